"""How often chunks that are gone were asked for, in case they come back: what an evicted prompt is recognised by.

A bounded memory of keys without chunks, as the ghost queues of 2Q, ARC and S3-FIFO are. Owned by the index.
"""

GENERATION_MIN = 1024
"""Keys of a generation while there are fewer chunks than that."""

SELECTIVE_GENERATION_MIN = 1 << 16
"""The same where second touches decide what is written: a tier that starts empty knows few chunks, and fills only with
what is recognised. Two generations take 12 MB."""


class GoneUses:
    """Uses by key, in two generations: when the younger is full, the older is forgotten as a whole.

    A plain dictionary that loses its oldest keys one by one would be searched through from its beginning each time.
    """

    def __init__(self, generation_min: int = GENERATION_MIN) -> None:
        self._generation_min = generation_min
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, key: bytes, uses: int, chunks: int) -> None:
        """Note what has gone; a generation is full when it has as many keys as there are ``chunks``."""
        self._young[key] = uses
        if len(self._young) >= max(chunks, self._generation_min):
            self._young, self._old = {}, self._young

    def recall(self, key: bytes) -> int | None:
        """What was noted of a key that is back, which is forgotten here; None: it is not known."""
        young, old = self._young.pop(key, None), self._old.pop(key, None)
        return old if young is None else young
