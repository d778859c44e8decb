"""Random histories below vLLM's offloading: engines that share one server, and what happens to them, drawn from a seed.

Requests come, hit, store, are preempted and aborted; rows are few, so vLLM evicts all the time, and so does the disk.
Caches are reset, engines are started anew, also with other limits; the server is killed or stands still, its tiers are
emptied, blobs are damaged. Each engine looks at its rows and accounts after every step (``offloading_host.py``); in
the end nothing is held any more, the disk is within its limit, and what is stored then is found.

A seed fixes the plan and the draws. Sockets, copies and the server are real, so two runs of one seed differ in when
things happen.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.kit.server.probe import figures, is_serving, server_pid, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.disk_probe import blob_files, du_bytes
from tests.kit.vllm.offloading_host import GROUPS, WHOLE, OffloadingHost
from tests.kit.vllm.row_accounts import tier_leaks
from tiered_kv.ops.server_link import ServerLink

RESERVE_BYTES: Final = 64 << 20
"""Of ``disk_bytes``, for metadata."""

KINDS: Final = ("rows", "slots", "bucket", "groups")
"""Whole rows that are lent; the same where they cannot be; lent ones before a bucket; rows of three groups."""

FIRST_WEIGHTS: Final = "w"
TRUNKS, TRUNK_ROWS = 3, 14
IDLE_S: Final = 0.0005
DOWN_S: Final = 0.01
"""A step takes longer while a server is started, or most of a history would run without one."""

PATIENCE_S: Final = 30.0
PATIENT_MS: Final = 5000
AT_ONCE_MAX: Final = 6
"""Requests of one engine."""


@dataclass(frozen=True)
class HistoryPlan:
    """What a seed draws.

    Attributes:
        turns: In which requests come.
        trouble: How likely any is, per turn.
    """

    seed: int
    kind: str
    engines: int
    rows: int
    turns: int
    trouble: float
    lookup_timeout_ms: int
    promotion_wait_ms: int | str

    @property
    def is_patient(self) -> bool:
        """What is held is loaded, however busy the machine is."""
        return self.lookup_timeout_ms == self.promotion_wait_ms == PATIENT_MS

    @classmethod
    def draw(cls, seed: int, kind: str, turns: int) -> "HistoryPlan":
        source = random.Random(f"{kind} {seed}")
        waits: tuple[int | str, ...] = (20, "auto", PATIENT_MS, PATIENT_MS, PATIENT_MS)
        return cls(
            seed,
            kind,
            engines=source.choice([1, 2, 2]),
            rows=source.choice([16, 24, 48]),
            turns=turns,
            trouble=source.choice([0.01, 0.02, 0.05]),
            lookup_timeout_ms=source.choice([5, 250, PATIENT_MS, PATIENT_MS]),
            promotion_wait_ms=source.choice(waits),
        )


class OffloadingHistory:
    """One history.

    Attributes:
        counts: What happened, of all engines.
    """

    def __init__(self, plan: HistoryPlan, place: Path) -> None:
        self._plan = plan
        self._source = random.Random(f"{plan.kind} {plan.seed} turns")
        self._place = place
        self.root = place / "cache"
        self._groups = GROUPS if plan.kind == "groups" else WHOLE
        self._trunks = [[self._source.randrange(1 << 30) for _ in range(TRUNK_ROWS)] for _ in range(TRUNKS)]
        self._thaw_at: int | None = None
        self._frozen = 0
        self._turn = 0
        self._is_damaged = False
        self.counts: Counter[str] = Counter()
        self._hosts: list[OffloadingHost] = []
        self._draw_limits()
        self._start()

    def _draw_limits(self) -> None:
        self._host_bytes = self._source.choice(["512KiB", "1MiB", "4MiB"])
        self._disk_bytes = RESERVE_BYTES + (self._source.choice([1, 2, 16]) << 20)

    def _start(self, weights: str = FIRST_WEIGHTS) -> None:
        self._hosts = [self._make(weights) for _ in range(self._plan.engines)]

    def _make(self, weights: str) -> OffloadingHost:
        place = {"storage_uri": f"file://{self.root}"}
        if self._plan.kind == "bucket":
            place = {"storage_uri": f"shared+file://{self._place / 'bucket'}", "disk_path": str(self.root)}
        settings = {
            "host_bytes": self._host_bytes,
            "disk_bytes": self._disk_bytes,
            "lookup_timeout_ms": self._plan.lookup_timeout_ms,
            "promotion_wait_ms": self._plan.promotion_wait_ms,
            "drain_s": 2.0,
            "start_timeout_s": 20.0,
        }
        return OffloadingHost(self._source, self._plan.rows, place | settings, self._groups, weights)

    # -- turns -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first request until all is at rest, and looked at.

        Raises:
            AssertionError: Something is not as it must be.
        """
        for _ in range(self._plan.turns):
            self._maybe_send()
            if self._source.random() < self._plan.trouble:
                self._trouble()
            self._go_on()
        self._come_to_rest()
        self._look_at_what_is_held()
        for host in self._hosts if self._plan.is_patient else ():
            self._look_whether_it_serves(host)
        self._look_at_the_server()

    def _go_on(self) -> None:
        self._turn += 1
        if self._thaw_at is not None and self._turn >= self._thaw_at:
            self._thaw()
        for host in self._hosts:
            host.step()
        is_up = all(host.is_served for host in self._hosts)
        time.sleep(IDLE_S if is_up or self._thaw_at is not None else DOWN_S)

    def _maybe_send(self) -> None:
        host = self._source.choice(self._hosts)
        if len(host.asks) < AT_ONCE_MAX and self._source.random() < 0.15:
            host.send(*self._prompt(), self._params())
        if self._source.random() < 0.01:
            self._source.choice(self._hosts).abort()
        if self._source.random() < 0.01:
            self._source.choice(self._hosts).ask_for(self._prompt()[0])
        if host.is_idle and self._source.random() < 0.3:
            host.forget()
            self.counts["forgets"] += 1

    def _prompt(self) -> tuple[list[int], int]:
        """What the rows of a request are made of, and how many are its prompt; the answer follows from the prompt."""
        source = self._source
        rows = source.choice(self._trunks)[: source.randrange(1, TRUNK_ROWS + 1)]
        rows += [source.randrange(1 << 30) for _ in range(source.choice([0, 0, 1, 3]))]
        answer = random.Random(repr(rows))
        return rows + [answer.randrange(1 << 30) for _ in range(source.choice([0, 0, 1, 2]))], len(rows)

    def _params(self) -> dict[str, Any] | None:
        source = self._source
        drawn: dict[str, Any] = {}
        if source.random() < 0.1:
            drawn["tiered_kv.skip_load"] = True
        if source.random() < 0.1:
            drawn["tiered_kv.skip_save"] = True
        if source.random() < 0.2:
            drawn["tiered_kv.session_id"] = source.choice("ab")
            drawn |= {f"tiered_kv.{name}": True for name in ("release", "demote") if source.random() < 0.3}
        if source.random() < 0.05:
            drawn["tiered_kv.prefetch"] = source.choice("ab")
        if source.random() < 0.05:
            drawn["tiered_kv.pin_ttl_s"] = 1
        return drawn or None

    # -- troubles ----------------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        happens: Callable[[], None] = self._source.choice(
            [
                *(self._kill, self._freeze, self._freeze, self._empty_tier, self._damage, self._damage),
                *(self._reset, self._reset, self._restart, self._change_limits),
            ]
        )
        happens()

    def _kill(self) -> None:
        if is_serving(self.root) and self._thaw_at is None:
            os.kill(server_pid(self.root), signal.SIGKILL)
            self.counts["kills"] += 1

    def _freeze(self) -> None:
        if self._thaw_at is None and is_serving(self.root):
            self._frozen = server_pid(self.root)
            with suppress(ProcessLookupError):
                os.kill(self._frozen, signal.SIGSTOP)
            self._thaw_at = self._turn + self._source.choice([5, 30, 120, 600])
            self.counts["freezes"] += 1

    def _thaw(self) -> None:
        """An engine that wanted rows back may have ended it, and another runs by now."""
        if self._thaw_at is not None:
            with suppress(ProcessLookupError):
                os.kill(self._frozen, signal.SIGCONT)
            self._thaw_at = None

    def _empty_tier(self) -> None:
        link = ServerLink.of_directory(self.root) if self._thaw_at is None and is_serving(self.root) else None
        if link is not None:
            with link:
                link.evict(self._source.choice(["host", "disk"]), b"", None, holes=True)
            self.counts["emptied"] += 1

    def _damage(self) -> None:
        """Of some blobs a bit is another, or they are cut, or gone."""
        self._is_damaged = True
        for path in blob_files(self.root):
            if self._source.random() < 0.3:
                with suppress(FileNotFoundError):
                    self._spoil(path)
                    self.counts["damaged"] += 1

    def _spoil(self, path: Path) -> None:
        what = self._source.choice(["gone", "cut", "bit"])
        if what == "gone":
            path.unlink()
            return
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            at = self._source.randrange(max(1, size))
            if what == "cut":
                file.truncate(at)
                return
            file.seek(at)
            (byte,) = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._source.randrange(8)]))

    def _reset(self) -> None:
        self._source.choice(self._hosts).reset()

    def _restart(self) -> None:
        """An engine ends amid its work, and another begins."""
        number = self._source.randrange(len(self._hosts))
        weights = self._weights_after(self._hosts[number])
        self._end(self._hosts[number])
        self._thaw()  # else it is not ready before its start gives up
        self._hosts[number] = self._make(weights)
        self.counts["restarts"] += 1

    def _weights_after(self, host: OffloadingHost) -> str:
        """Those of the last reset that the server has heard of; of two engines only one was reset."""
        return host.durable if len(self._hosts) == 1 else FIRST_WEIGHTS

    def _end(self, host: OffloadingHost) -> None:
        host.close()
        self.counts.update(host.counts)

    def _change_limits(self) -> None:
        weights = self._weights_after(self._hosts[0])
        for host in self._hosts:
            self._end(host)
        self._thaw()
        end_server(self.root)
        self._draw_limits()
        self._start(weights)
        self.counts["other_limits"] += 1

    # -- the end -----------------------------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Go on, without new requests, until it is so."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            states = [host.state() for host in self._hosts] if time.monotonic() > end_s else []
            assert not states, f"still waiting for {what}. engines={states}"
            self._go_on()

    def _come_to_rest(self) -> None:
        self._until(lambda: all(host.is_idle for host in self._hosts), "requests and jobs to end")
        self._thaw()

    def _look_at_what_is_held(self) -> None:
        for host in self._hosts:
            jobs = host.tier._jobs
            assert jobs is not None

            def is_at_rest(host: OffloadingHost = host, jobs: Any = jobs) -> bool:
                jobs.poll()
                host.check()
                return bool(jobs.is_ready) and not tier_leaks(host.tier)

            try:
                wait_for(is_at_rest, "rest", deadline_s=PATIENCE_S)
            except TimeoutError as exc:
                raise AssertionError(f"at rest it holds {tier_leaks(host.tier)}. ready={jobs.is_ready}") from exc

    def _look_whether_it_serves(self, host: OffloadingHost) -> None:
        """After all that: what is stored now is found when vLLM's memory has it no more."""
        for _ in range(5):
            rows, loaded = [self._source.randrange(1 << 30) for _ in range(4)], host.counts["loaded"]
            for _ in range(3):  # computed and stored, loaded, loaded
                host.send(rows, len(rows)).local = 0
                self._until(lambda: host.is_idle, "a request")
                host.forget()
            if host.counts["loaded"] > loaded:
                return
        raise AssertionError(f"nothing is found any more. counts={dict(host.counts)}")

    def _look_at_the_server(self) -> None:
        self._come_to_rest()
        self._look_at_what_is_held()

        def is_at_rest() -> bool:
            held = figures(self.root)["hierarchy"]
            names = ("reserved_slots", "leased_bytes", "lent_bytes", "lookups")
            return not any(held[name] for name in names) and held["sessions"] == len(self._hosts)

        try:
            wait_for(is_at_rest, "the server", deadline_s=PATIENCE_S)
        except TimeoutError as exc:
            raise AssertionError(f"the server holds {figures(self.root)['hierarchy']}") from exc
        wait_written(self.root)
        used = du_bytes(self.root / "blobs", self.root / "tmp")
        assert used + RESERVE_BYTES <= self._disk_bytes, f"over the limit. used={used} limit={self._disk_bytes}"
        if not self._is_damaged:
            (disk,) = [tier for tier in figures(self.root)["tiers"] if tier["name"] == "disk"]
            files = len(blob_files(self.root))
            assert (disk["used_bytes"], disk["blobs"]) == (used, files), f"{disk} used={used} files={files}"

    def close(self) -> None:
        """End engines and server, whatever state they are in."""
        self._thaw()
        for host in self._hosts:
            self._end(host)
        self._hosts = []
        end_server(self.root)
