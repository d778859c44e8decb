"""Blob verification around any tier: nothing wrong goes in, nothing wrong comes out.

Owns no state. Must not delete or heal anything: tiering decides what a corrupt blob costs. Stacked by
``tiers/open.py`` right around the medium, so every medium gets the same checks.
"""

from collections.abc import Callable

from tiered_kv.chunks.header import PEEK_BYTES, BlobCheck, BlobFormat, peek
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch
from tiered_kv.tiers.base import BlobName, Tier, TierWrapper


class VerifiedTier(TierWrapper):
    """Checks the header before a put and the whole blob after a get.

    Threads: any; as thread-safe as ``inner``.
    """

    def __init__(self, inner: Tier, formats: Callable[[bytes], BlobFormat | None]) -> None:
        """Wrap ``inner``.

        Args:
            formats: Gives the blob format of a namespace digest; None where the namespace is not known here.
        """
        super().__init__(inner)
        self._formats = formats

    def put(self, name: BlobName, blob: memoryview) -> None:
        """Store a sealed blob; its header must say the name it is stored under.

        The payload is not hashed again: it was sealed a moment ago from the same slot, and a get finds any damage.

        Raises:
            ChunkCorrupt: The header is damaged, was never sealed, or says another name.
            ChunkMismatch: The header is of another format version.
        """
        _check_name(name, blob)
        self.inner.put(name, blob)

    def put_if(self, name: BlobName, blob: memoryview, is_wanted: Callable[[], bool]) -> bool:
        """The same; see ``Tier.put_if``."""
        _check_name(name, blob)
        return self.inner.put_if(name, blob, is_wanted)

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        """Read and verify; a corrupt blob is read once more, because the medium may have read it wrong.

        Raises:
            ChunkCorrupt: Twice the bytes were not what was sealed.
            ChunkMismatch: The blob is of another namespace or version, or its namespace is not known here.
        """
        form = self._formats(name.namespace)
        if form is None:
            raise ChunkMismatch(f"no format is known for the namespace. namespace={name.namespace.hex()}")
        try:
            return self._read(form, name, buffer)
        except ChunkCorrupt:
            return self._read(form, name, buffer)

    def _read(self, form: BlobFormat, name: BlobName, buffer: memoryview) -> bool:
        check = BlobCheck(form, buffer)
        if not self.inner.get_into_by_pieces(name, buffer, check.advance):
            return False
        check.finish(name.key, None)
        return True


def _check_name(name: BlobName, blob: memoryview) -> None:
    header = peek(blob[:PEEK_BYTES])
    found = BlobName.of(header.record)
    if found != name:
        raise ChunkCorrupt(
            "blob is not what its name says. "
            f"observed={found.namespace.hex()}/{found.key.hex()} expected={name.namespace.hex()}/{name.key.hex()}"
        )
