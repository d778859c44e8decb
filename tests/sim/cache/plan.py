"""What a seed of the cache simulation draws: machines, clients, requests, faults that begin and end, other mishaps.

A plan is a value, drawn before anything runs, so that a failure can show all of it.
"""

import random
from dataclasses import dataclass, field, replace

from tests.kit.engine_world import BLOB_BYTES, Path
from tests.kit.tiering.parts import PARTS as TIERING_PARTS
from tests.sim.cache.clients import Manners
from tests.sim.cache.faults import RATES
from tests.sim.cache.media import Speed
from tests.sim.cache.node import Machine
from tests.sim.cache.oracle import NAMES
from tiered_kv.engine import engine
from tiered_kv.tiering.admission import ALL, SECOND_TOUCH

BLOB_MAX = BLOB_BYTES + 4096
"""Of the largest geometry."""

PARTS = (
    *TIERING_PARTS,
    (engine, "ENDED_MAX"),
    (engine, "SLICE_S"),
)
"""What bounds a step."""

DISK_SPEEDS = (Speed(5e-5, 1e9), Speed(1e-3, 2e7), Speed(8e-3, 1e6), Speed(3e-2, 2e5))
BUCKET_SPEEDS = (Speed(2e-3, 1e8), Speed(2e-2, 5e6), Speed(0.15, 5e5), Speed(0.4, 1e5))


@dataclass(frozen=True, slots=True)
class Window:
    """A fault of one node's medium, while it lasts."""

    begin_s: float
    end_s: float
    node: int
    medium: str
    kind: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that arrives.

    Attributes:
        generated: Chunks at the end of its path that are its answer's; the rest is its prompt.
    """

    at_s: float
    client: int
    path: Path
    start: int
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Mishap:
    """Anything else that happens once; what it hits follows from ``pick``."""

    at_s: float
    what: str
    node: int
    pick: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a seed fixes but the order of events.

    Attributes:
        parts: How much of what goes in parts one step does, by `PARTS`; none: as much as the product does.
    """

    seed: int
    machines: tuple[Machine, ...]
    disk_bytes: int | None
    has_bucket: bool
    bucket_bytes: int | None
    clients: tuple[tuple[int, str], ...]
    manners: Manners
    active_s: float
    asks: tuple[Ask, ...] = ()
    windows: tuple[Window, ...] = ()
    mishaps: tuple[Mishap, ...] = field(default=())
    parts: tuple[float, ...] = ()

    def lines(self) -> list[str]:
        """The plan, to be read."""
        limits = f"disk_bytes={self.disk_bytes} bucket={self.has_bucket} bucket_bytes={self.bucket_bytes}"
        head = [
            f"seed {self.seed}: {limits} active_s={self.active_s:.1f}",
            f"manners: {self.manners}",
            *(f"node{number}: {machine}" for number, machine in enumerate(self.machines)),
            "clients: " + ", ".join(f"{n}=node{node}/{space}" for n, (node, space) in enumerate(self.clients)),
        ]
        asks = "asks: " + ", ".join(
            f"{a.at_s:.2f} c{a.client} {'.'.join(map(str, a.path))}+{a.start}~{a.generated}" for a in self.asks
        )
        windows = [f"fault: {w.begin_s:.2f}..{w.end_s:.2f} node{w.node} {w.medium} {w.kind}" for w in self.windows]
        mishaps = [f"mishap: {m.at_s:.2f} node{m.node} {m.what} {m.pick}" for m in self.mishaps]
        parts = [f"parts: {self.parts}"] if self.parts else []
        return [*head, *parts, asks, *windows, *mishaps]


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    draw = random.Random(f"cache simulation {seed}")
    has_disk, has_bucket = draw.choice([(True, True), (True, True), (True, False), (False, True)])
    rules = random.Random(f"admission {seed}")  # of its own, as the next: all else of a seed stays what it was
    fairness = random.Random(f"shares {seed}")
    answers = random.Random(f"answers {seed}")
    nodes = draw.choice([1, 2]) if has_bucket else 1
    is_storm = draw.random() < 0.3
    active_s = draw.uniform(2.0, 6.0) if is_storm else draw.choice([1.0, 1.0, 1.0, 3.0]) * draw.uniform(4.0, 16.0)
    disk_bytes = draw.choice([6, 8] if is_storm else [6, 8, 16, 32]) * BLOB_MAX if has_disk else None
    spaces = draw.sample(NAMES, draw.choice([1, 1, 2, 3]))
    clients = [(n % nodes, draw.choice(spaces)) for n in range(draw.randint(nodes, 2 * nodes + 1))]
    manners = Manners(
        patience_s=draw.choice([0.01, 0.2, 2.0]),
        impatient=draw.random(),
        abort=draw.choice([0.0, 0.1, 0.4]),
        load_s=draw.choice([0.001, 0.02, 0.2]),
        compute_s=draw.choice([0.001, 0.05]),
    )
    return Plan(
        seed=seed,
        machines=tuple(
            _machine(draw, rules, _shares(fairness), has_disk=has_disk, has_bucket=has_bucket) for _ in range(nodes)
        ),
        disk_bytes=disk_bytes,
        has_bucket=has_bucket,
        bucket_bytes=draw.choice([None, None, 12 * BLOB_MAX, 30 * BLOB_MAX]) if has_bucket else None,
        clients=tuple(clients),
        manners=manners,
        active_s=active_s,
        asks=_answered(answers, _asks(draw, active_s, len(clients), 50 if is_storm else draw.choice([8, 16, 30]))),
        windows=_windows(draw, active_s, nodes, [*["disk"] * has_disk, *["bucket"] * has_bucket]),
        mishaps=_with_emptied(random.Random(f"emptied {seed}"), _mishaps(draw, active_s, nodes), active_s, has_bucket),
        parts=_parts(random.Random(f"parts {seed}")),
    )


def _parts(draw: random.Random) -> tuple[float, ...]:
    """A prompt of a schedule has six chunks at most: so that all of this meets all else, a step does one or a few."""
    if draw.random() < 0.4:
        return ()
    return (*(draw.choice([1, 1, 2, 4, 100]) for _ in PARTS[:-1]), draw.choice([0.0, 0.001]))


def _shares(draw: random.Random) -> dict[str, tuple[float, float]]:
    """What each model keeps and may take; half of all machines have none."""
    if draw.random() < 0.5:
        return dict.fromkeys(NAMES, (0.0, 1.0))
    return {name: draw.choice([(0.0, 1.0), (0.2, 1.0), (0.0, 0.8), (0.1, 0.8)]) for name in NAMES}


def _machine(
    draw: random.Random,
    rules: random.Random,
    shares: dict[str, tuple[float, float]],
    *,
    has_disk: bool,
    has_bucket: bool,
) -> Machine:
    return Machine(
        host_bytes=draw.choice([8, 12, 24]) * BLOB_MAX,
        disk_speed=draw.choice(DISK_SPEEDS) if has_disk else None,
        bucket_speed=draw.choice(BUCKET_SPEEDS) if has_bucket else None,
        remote_threads=draw.choice([2, 4, 16]),
        admissions={tier: rules.choice([ALL, ALL, SECOND_TOUCH]) for tier in ("disk", "object")},
        shares=shares,
    )


def _asks(draw: random.Random, active_s: float, clients: int, count: int) -> tuple[Ask, ...]:
    """Prompts that share beginnings, some of them asked for again and again."""
    pool = [tuple(draw.randint(0, 1) for _ in range(draw.randint(1, 6))) for _ in range(draw.choice([2, 4, 8]))]
    asks = []
    for number in range(count):
        path = draw.choice(pool) if draw.random() < 0.85 else (10 + number, *draw.choice(pool)[:3])
        start = draw.randrange(len(path)) if draw.random() < 0.2 else 0
        asks.append(Ask(draw.uniform(0.5, active_s), draw.randrange(clients), path, start))
    return tuple(sorted(asks, key=lambda ask: ask.at_s))


def _answered(draw: random.Random, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """Some requests generate the end of what others have as their prompt, or nobody has."""
    return tuple(
        replace(ask, generated=draw.randint(1, len(ask.path) - 1)) if draw.random() < 0.4 and len(ask.path) > 1 else ask
        for ask in asks
    )


def _windows(draw: random.Random, active_s: float, nodes: int, media: list[str]) -> tuple[Window, ...]:
    windows = []
    for _ in range(draw.choice([0, 1, 2, 3, 6])):
        begin_s = draw.uniform(0, active_s)
        end_s = min(active_s, begin_s + draw.expovariate(1 / draw.choice([0.3, 2.0, 8.0])))
        windows.append(Window(begin_s, end_s, draw.randrange(nodes), draw.choice(media), draw.choice(sorted(RATES))))
    return tuple(sorted(windows, key=lambda window: window.begin_s))


MISHAPS = (
    "crash", "crash", "power", "stop", "vanish", "vanish", "jump", "pin", "pin", "pin", "unpin",
    "damage", "damage", "refuse", "remove", "clear_host", "freeze", "gpu", "gpu",
)  # fmt: skip


def _with_emptied(
    draw: random.Random, mishaps: tuple[Mishap, ...], active_s: float, has_bucket: bool
) -> tuple[Mishap, ...]:
    """In some schedules the bucket loses much at once, now and then."""
    moments = [draw.uniform(0.5, active_s) for _ in range(draw.choice([0, 0, 1, 3]) if has_bucket else 0)]
    emptied = [Mishap(at_s, "empty", 0, draw.randrange(1 << 16)) for at_s in moments]
    return tuple(sorted([*mishaps, *emptied], key=lambda mishap: mishap.at_s))


def _mishaps(draw: random.Random, active_s: float, nodes: int) -> tuple[Mishap, ...]:
    mishaps = []
    for _ in range(draw.choice([0, 1, 3, 8])):
        what = draw.choice(MISHAPS)
        last_s = active_s / 3 if what == "pin" else active_s  # early, so that much happens to what is pinned
        mishaps.append(
            Mishap(draw.uniform(0.5, max(1.0, last_s)), what, draw.randrange(nodes), draw.randrange(1 << 16))
        )
    return tuple(sorted(mishaps, key=lambda mishap: mishap.at_s))
