"""Which namespaces a reset has retired, as the tier's own files tell it. Reads nothing: ``Storage.epochs`` does."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.keys.namespace import Namespace

_NUMBERED: Final = re.compile(r"(base|shared)-([0-9]{1,18})")
_PRIVATE: Final = "private-"


@dataclass(frozen=True, slots=True)
class BaseEpochs:
    """The epochs that sessions of a tier open with.

    Attributes:
        kind: ``base`` in a directory, ``shared`` in a bucket.
        numbers: By digest of the record with an empty epoch, in hex.
        floor: Added to every number.
    """

    kind: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    floor: int = 0

    def has_retired(self, namespace: Namespace) -> bool:
        """Whether a reset made this namespace one that no session opens again.

        Epochs of another kind cannot be judged here and count as in force, e.g. those that a directory holds in front
        of a bucket.
        """
        fields = namespace.fields
        found = _NUMBERED.fullmatch(str(fields["epoch"]))
        if found is None or found[1] != self.kind:
            return False
        base = Namespace.from_fields(fields | {"epoch": ""})
        return int(found[2]) < self.floor + self.numbers.get(base.digest.hex(), 0)

    def in_force(self, namespace: Namespace) -> tuple[bytes, int] | None:
        """The namespace's digest without its epoch, and the number, where that is the one that a tier's files name."""
        fields = namespace.fields
        found = _NUMBERED.fullmatch(str(fields["epoch"]))
        if found is None or found[1] != self.kind:
            return None
        base, number = Namespace.from_fields(fields | {"epoch": ""}).digest, int(found[2])
        return (base, number) if self.numbers.get(base.hex()) == number else None


def is_private(namespace: Namespace) -> bool:
    """Whether the namespace is that of one engine since its reset: when the engine ends, nobody opens it again."""
    return str(namespace.fields["epoch"]).startswith(_PRIVATE)
