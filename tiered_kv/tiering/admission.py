"""Which chunks are worth writing to a secondary tier: a policy of its own for each tier.

    policy          a chunk is written to the tier
    all             when it is stored
    second-touch    when its prefix is asked for or stored again, or is pinned, or a client says that it will be
    none            never: the tier is read only (no setting, the tier says so)

Whatever the policy, a chunk with generated tokens (an answer's) is written once a prompt was seen to contain it. Most
of what is generated comes back with the next turn, but reasoning that the next turn drops, an answer that is
regenerated and the others of ``n`` never do. docs/decisions/0035-answers.md has the figures.

A second touch is what the index counts as a use (``index.py``): the ghost list keeps it across eviction, and it is
never less for a parent than for its child, so what is admitted is closed under prefixes. Until then a chunk lies in the
tiers above only, and nothing waits for its write: it is neither queued, nor deferred, nor drained.
docs/decisions/0017-admission.md has the figures.
"""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

from tiered_kv.tiering.index import Entry

ALL: Final = "all"
SECOND_TOUCH: Final = "second-touch"
NONE: Final = "none"


class AdmissionPolicy(Protocol):
    """Decides which chunks are worth a write.

    Attributes:
        needs_uses: The answer depends on how often a chunk was used: the index then remembers it for evicted chunks,
            and a chunk is offered again when it is used.
    """

    needs_uses: ClassVar[bool]

    def __init__(self) -> None:
        """One policy per tier."""

    def admits(self, entry: Entry) -> bool:
        """Whether the chunk may be written now.

        A chunk that is admitted stays so while the index knows it, and so does the prefix before it.
        """


class AdmitAll:
    """Every chunk is written when it is stored."""

    needs_uses: ClassVar[bool] = False

    def admits(self, entry: Entry) -> bool:
        """Always."""
        del entry
        return True


class SecondTouch:
    """A chunk is written when it was used once since it came."""

    needs_uses: ClassVar[bool] = True

    def admits(self, entry: Entry) -> bool:
        """Whether it was used. A tail is written behind a chunk that was."""
        return entry.uses > 0 or entry.tail_tokens > 0


class AdmitNothing:
    """No chunk is ever written."""

    needs_uses: ClassVar[bool] = False

    def admits(self, entry: Entry) -> bool:
        """Never."""
        del entry
        return False


ADMISSION_POLICIES: dict[str, type[AdmissionPolicy]] = {ALL: AdmitAll, SECOND_TOUCH: SecondTouch}
"""Policies by the names of the settings ``disk_admission`` and ``storage_admission``."""


def policy_class(name: str) -> type[AdmissionPolicy]:
    """The policy of that name: one that a user may choose, or that of a read-only tier."""
    return AdmitNothing if name == NONE else ADMISSION_POLICIES[name]


class Admission:
    """One tier's admission policy and its counts.

    Attributes:
        policy: Decides.
        admitted: Writes that were queued or deferred, those of one chunk again after its first was dropped included.
            Written by the tier's source.
        declined: Chunks that came and were not admitted; each may be admitted later. Written by the tier's source.

    Threads: one owner, tiering.
    """

    def __init__(self, policy: str = ALL) -> None:
        self.policy = policy_class(policy)()
        self.admitted = 0
        self.declined = 0

    def admits(self, entry: Entry) -> bool:
        """Whether the chunk may be written now: an answer's not before it was asked for."""
        return not entry.is_unasked and self.policy.admits(entry)
