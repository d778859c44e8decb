"""A world that remembers who asked for what, and asserts that a selective tier is written nothing that came only once.

Nor is any tier written an answer's chunk that came only once. Counts by itself: that a chunk is there at the start or
put there by others, every commit of it and every lookup of a prefix with it is a touch, and of an answer's chunk every
commit of a prompt's chunk behind it. Tiering counts fewer (a lookup of what is not held is none), so two touches of a
chunk, or of one behind it, must have come before a write.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from tests.kit.spaces import Space
from tests.kit.tiering.oracle import World
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.tiering.admission import SECOND_TOUCH
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import Copy, Job, Write


class TouchedWorld(World):
    """Tiering with a rule of admission for each secondary tier."""

    def __init__(self, tiering: Tiering, capacities: list[int | None], admissions: Sequence[str]) -> None:
        super().__init__(tiering, capacities)
        self._admissions = dict(enumerate(admissions, 1))
        self._touches: Counter[bytes] = Counter()
        self._children: dict[bytes, set[bytes]] = defaultdict(set)
        self._answers: set[bytes] = set()
        self._restored: set[bytes] = set()
        self._prompts: set[bytes] = set()  # what a chunk from the start, or a prompt's, goes on from

    def restore(self, tier: int, space: Space, path: tuple[int, ...]) -> None:
        self._touch(space, path)
        self._restored.add(space.key(path))
        self._prompts.add(space.record(path).parent)
        super().restore(tier, space, path)

    def others_store(self, space: Space, path: tuple[int, ...]) -> None:
        for depth in range(len(path)):
            self._touch(space, path[: depth + 1])
        super().others_store(space, path)

    def lookup(
        self,
        session: int,
        path: tuple[int, ...],
        start: int = 0,
        turn: tuple[int, int] = (0, 0),
        *,
        counted: int = 0,
        **more: Any,
    ) -> int:
        for depth in range(counted, len(path)):
            self._touch(self.spaces[session], path[: depth + 1])
        return super().lookup(session, path, start, turn, counted=counted, **more)

    def commit(self, session: int, path: tuple[int, ...], *, is_answer: bool = False) -> bool:
        space = self.spaces[session]
        is_taken = super().commit(session, path, is_answer=is_answer)
        if is_taken:
            self._touch(space, path)
            before = [path[:depth] for depth in range(1, len(path))]
            for one in [] if is_answer else before:
                self._touch(space, one, space.key(one) in self._answers)
            if not is_answer:
                self._prompts.add(space.record(path).parent)
        if is_taken and is_answer and space.key(path) not in self._prompts:
            self._answers.add(space.key(path))
        return is_taken

    def want(self, session: int, path: tuple[int, ...]) -> None:
        """Somebody says that a chunk will be asked for: as good as both touches."""
        space = self.spaces[session]
        self._touch(space, path, 2)
        self.tiering.want(space.namespace, space.key(path))

    def _touch(self, space: Space, path: tuple[int, ...], times: int = 1) -> None:
        record = space.record(path)
        self._touches[record.key] += times
        self._children[record.parent].add(record.key)

    def _begin(self, job: Job) -> None:
        if isinstance(job, Write | Copy) and self._admissions[job.tier] == SECOND_TOUCH:
            is_tail = tail_tokens(job.record.key) > 0
            key = job.record.parent if is_tail else job.record.key
            was_written = is_tail and key in self._restored  # the chunk before it, by an earlier server
            assert was_written or self._is_touched_twice(key), "a chunk is written that came only once"
        if isinstance(job, Write | Copy) and job.record.key in self._answers:
            assert self._is_touched_twice(job.record.key), "an answer is written that no prompt has"
        if isinstance(job, Copy):
            seen = [space.namespace for space in self._spaces_seen]
            assert job.record.namespace in seen, "an upload of a namespace whose sizes nobody knows"
        super()._begin(job)

    def _is_touched_twice(self, key: bytes) -> bool:
        return self._touches[key] > 1 or any(map(self._is_touched_twice, self._children[key]))
