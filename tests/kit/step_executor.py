"""An executor whose tasks run when a test says so."""

from collections import deque
from collections.abc import Callable

from tiered_kv.engine.executor import Pool


class StepExecutor:
    """No threads: tasks run when a test says so, in an order the test picks.

    ``step(choose)`` runs one waiting task: ``choose(n)`` returns which of the ``n`` waiting ones, e.g. a seeded
    ``random.Random.randrange`` or a Hypothesis draw.
    """

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, pool: Pool, priority: int, task: Callable[[], None]) -> None:
        del pool, priority
        self.waiting.append(task)

    def step(self, choose: Callable[[int], int] = lambda _count: 0) -> bool:
        """Run one task; False when none waits."""
        if not self.waiting:
            return False
        index = choose(len(self.waiting))
        self.waiting.rotate(-index)
        task = self.waiting.popleft()
        self.waiting.rotate(index)
        task()
        return True

    def notify(self) -> None:
        """Nobody sleeps."""

    def fileno(self) -> int:
        return -1

    def drain_notifications(self) -> None:
        """Nothing to drain."""

    def close(self) -> None:
        self.waiting.clear()


class Noting(StepExecutor):
    """Notes that the owner was woken, among what else a test notes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def notify(self) -> None:
        self.seen.append("notified")

    @property
    def written(self) -> list[object]:
        """What is no waking."""
        return [one for one in self.seen if one != "notified"]
