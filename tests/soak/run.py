"""One soak: machines at capacity on one object store, traffic, faults, samples every second; then rest, and verdicts.

::

    faults    traffic and faults; after a quarter of it the last machine's server is killed no more, and judged in the
              second half
    recovery  traffic without faults
    rest      no traffic: nothing leased, nothing pending, accounts exact
    again     the engines end, the servers end by themselves; new ones under the same load have as many threads
              and descriptors as the old ones had
    end       no process and no shared memory is left
"""

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.server.probe import wait_for
from tests.kit.server.processes import still_running
from tests.kit.server.traffic import EngineTraffic, Habits, Prompts, turn_until
from tests.kit.storage.disk_probe import blob_files, du_bytes
from tests.kit.storage.stored_blobs import BlobReader
from tests.soak.faults import Faults, Pace
from tests.soak.judgement import KNOWN_CHUNK_MIB, SAMPLES_MIN, SPAN_S, Trend, trend
from tests.soak.node import BUCKET_BYTES, RESERVE_BYTES, Node
from tests.soak.samples import ProcessSample, children, slab_holders
from tests.soak.stores import Store, problems
from tiered_kv.config import Config

SAMPLE_S = 1.0
QUIET_SAMPLES = 4
ENDED_S = 180.0
TCP_MAX = 2 * 16
"""Connections to the object store that may be kept open: ``storage_concurrency`` to load and as many to store."""

LAZY_THREADS = 2
"""Threads by which two equal servers may differ: a pool starts one only when all it has are busy."""

BUCKET_EVERY = 10
"""Every so many samples the bucket is listed."""

REST_S = 300.0
"""Longest wait for what must come to rest."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how much.

    Attributes:
        faults_s, recovery_s, again_s: Lengths of the phases that have one.
        nodes: Machines; the server of the last one lives from a quarter of the time on.
        clients: Engines of each.
        gap_s: Mean time between two requests of an engine.
    """

    seed: int
    faults_s: float
    recovery_s: float
    again_s: float
    pace: Pace
    nodes: int = 2
    clients: int = 3
    gap_s: float = 0.1


@dataclass(slots=True)
class Series:
    """Samples of one machine as columns, and what they broke."""

    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)

    def thinned(self, count: int) -> dict[str, list[Any]]:
        """About so many rows, evenly spread."""
        return {name: values[:: max(1, len(values) // count)] for name, values in self.columns.items()}


@dataclass(slots=True)
class Soak:
    """A run in its phases.

    Attributes:
        verdicts: By check: whether it holds, and what was seen.
    """

    plan: Plan
    store: Store
    work: Path
    say: Callable[[str], None] = print
    nodes: list[Node] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    bucket: Series = field(default_factory=Series)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    trends: dict[str, Trend] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    _over: list[str] = field(default_factory=list)
    _start_s: float = 0.0
    _taken: int = 0

    def run(self) -> None:
        """All phases; every verdict is in ``verdicts`` afterwards.

        Raises:
            RuntimeError, TimeoutError: It could not be carried through.
        """
        plan, others = self.plan, set(children(os.getpid()))
        try:
            for number in range(plan.nodes):
                name = f"node-{number + 1}"
                node = Node(name, self.work, self.store, plan.clients, seed=plan.seed, gap_s=plan.gap_s)
                self.nodes.append(node)
                self.series[name] = Series()
            self._wait_ready()
            self._start_s = time.monotonic()
            self._run_with_faults()
            self._take_samples(plan.recovery_s)
            self._come_to_rest()
            before = self._at_rest()
            self._begin_again()
            self._compare_with_fresh(before)
            self._make_progress()
            self._end(others)
        finally:
            for node in self.nodes:
                node.close()
        self._check_all_along()

    def _judge(self, check: str, holds: object, seen: object) -> None:
        self.verdicts[check] = {"holds": bool(holds), "seen": seen}
        self.say(f"{'ok    ' if holds else 'FAILED'} {check}: {seen}")

    # -- phases --------------------------------------------------------------------------------------------------

    def _run_with_faults(self) -> None:
        plan, survivor = self.plan, self.nodes[-1]
        faults = Faults(self.nodes, self.store, plan.pace, plan.seed)
        faults.start()
        try:
            self._take_samples(plan.faults_s / 4, faults.check)
            faults.spared.add(survivor.name)
            time.sleep(SAMPLE_S)  # a kill that was just drawn
            wait_for(lambda: survivor.server_pid() is not None, "the server that stays", deadline_s=REST_S)
            survivor_pid = survivor.server_pid()
            self._take_samples(plan.faults_s / 4, faults.check)  # what any server does once, it does here
            half = len(self.series[survivor.name].columns["t_s"])
            self._take_samples(plan.faults_s / 2, faults.check)
        finally:
            faults.end()
        self.faults = faults.counts
        self._judge_memory(survivor, half)
        is_same = survivor_pid is not None and survivor.server_pid() == survivor_pid
        self._judge(
            "a server outlives all faults but its kill", is_same, f"pid {survivor_pid} from a quarter of the time on"
        )

    def _wait_ready(self) -> None:
        for node in self.nodes:
            wait_for(lambda node=node: node.is_ready, f"the sessions of {node.name}", deadline_s=REST_S)  # type: ignore[misc]

    def _take_samples(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            check()
            self._sample()
            time.sleep(SAMPLE_S)

    def _sample(self) -> None:
        now_s = round(time.monotonic() - self._start_s, 1)
        for node in self.nodes:
            node.check_clients()
            row = self._row(node)
            if row["du"] + RESERVE_BYTES > node.disk_bytes:
                row["du"] = node.exact_du_bytes()
            self.series[node.name].add({"t_s": now_s, **row})
            if row["du"] + RESERVE_BYTES > node.disk_bytes:
                self._over.append(f"{node.name}: {row['du']} bytes of blobs and temp files after {now_s} s")
        if self._taken % BUCKET_EVERY == 0:
            sizes = self.store.blobs()
            used = sum(sizes.values())
            self.bucket.add({"t_s": now_s, "blobs": len(sizes), "bytes": used})
            if used > BUCKET_BYTES:
                self._over.append(f"the bucket: {used} bytes after {now_s} s")
        self._taken += 1

    def _row(self, node: Node) -> dict[str, Any]:
        found, client = node.sample()
        row: dict[str, Any] = {"pid": found.pid, "du": found.du_bytes, "temp": found.temp_files}
        row |= _of_process("server", found.process) | _of_process("client", client)
        figures = found.figures
        if figures is None:
            names = ("clients", "leased", "reserved", "pending", "disk", "uploads", "breaker", "known")
            return row | dict.fromkeys(names)
        host, uploads = figures.hierarchy, found.of_tier("object")
        return row | {
            "clients": figures.clients,
            "leased": host["leased_bytes"],
            "reserved": host["reserved_slots"],
            "pending": figures.pending_writes,
            "disk": found.of_tier("disk").used_bytes,
            "uploads": uploads.backlog_chunks,
            "breaker": uploads.breaker,
            "known": host["chunks"],
        }

    def _come_to_rest(self) -> None:
        """Let the engines end what they do, and the servers write what they hold."""
        self._wait_ready()
        for node in self.nodes:
            node.tell("stop")
        for node in self.nodes:
            wait_for(lambda node=node: node.is_idle, f"the requests of {node.name}", deadline_s=REST_S)  # type: ignore[misc]
            wait_for(lambda node=node: self._row(node)["leased"] == 0, "the leases", deadline_s=REST_S)  # type: ignore[misc]
            wait_for(lambda node=node: self._is_written(node), f"the writes of {node.name}", deadline_s=REST_S)  # type: ignore[misc]

    def _is_written(self, node: Node) -> bool:
        row = self._row(node)
        return (row["pending"], row["temp"]) == (0, 0)

    def _quiet_row(self, node: Node) -> dict[str, Any]:
        """A sample without the connections of others that just looked at the server."""
        rows: list[dict[str, Any]] = []

        def has_enough() -> bool:
            time.sleep(SAMPLE_S / 2)
            row = self._row(node)
            rows.extend([row] if row["leased"] is not None else [])  # else the server did not answer in time
            return len(rows) >= QUIET_SAMPLES

        wait_for(has_enough, f"the figures of {node.name}", deadline_s=REST_S)
        return min(rows, key=lambda row: sum(row["server_descriptors"].values()))

    def _at_rest(self) -> dict[str, dict[str, Any]]:
        """What every server and engine holds at rest, with verdicts on what must be nothing."""
        rows = {node.name: self._quiet_row(node) for node in self.nodes}
        self._judge("no lease is left", not any(row["leased"] for row in rows.values()), _each(rows, "leased"))
        self._judge("nothing is pending", not any(row["pending"] for row in rows.values()), _each(rows, "pending"))
        self._judge("no temp file is left", not any(row["temp"] for row in rows.values()), _each(rows, "temp"))
        self._judge(
            "no zombie is left", not any(row["client_zombies"] for row in rows.values()), _each(rows, "client_zombies")
        )
        for node in self.nodes:  # what was damaged behind the server's back and nobody asked for since
            node.operate("verify")
        self.nodes[0].operate("verify all of the bucket")
        return rows

    def _begin_again(self) -> None:
        """New engines and, because the old ones ended, new servers: the directory is opened and looked at first."""
        for node in self.nodes:
            node.end_clients()
            node.wait_server_ended()
        self._judge("servers end by themselves after their last engine", True, f"{len(self.nodes)} servers")
        bad: list[str] = []
        for node in self.nodes:
            bad += BlobReader(node.root / "blobs").problems()
        bad += problems(self.store)
        self._judge("every blob on disk and in the bucket is right after verify --repair", not bad, bad[:3] or "all")
        for node in self.nodes:
            node.start_again(self.plan.clients)
        self._wait_ready()
        self._take_samples(self.plan.again_s)
        self._come_to_rest()

    def _compare_with_fresh(self, before: dict[str, dict[str, Any]]) -> None:
        """Old servers held no more than new ones do; and the new ones' accounts are exact."""
        after = {node.name: self._quiet_row(node) for node in self.nodes}
        survivor = self.nodes[-1].name
        for who in ("server", "client"):
            for what in ("threads", "descriptors", "slabs"):
                old, new = (dict(row[survivor])[f"{who}_{what}"] for row in (before, after))
                if what == "descriptors":
                    kept = [one.pop("tcp", 0) for one in (old, new)]
                    self._judge(f"{who}: few connections are kept", max(kept) <= TCP_MAX, f"{kept[0]}, fresh {kept[1]}")
                is_same = abs(old - new) <= LAZY_THREADS if what == "threads" else old == new
                self._judge(f"{who}: {what} as of a fresh one under the same load", is_same, f"{old}, fresh {new}")
        exact = {}
        for node in self.nodes:
            files = du_bytes(node.root / "blobs")
            exact[node.name] = (files, after[node.name]["disk"], len(blob_files(node.root)))
        is_exact = all(files == told for files, told, _ in exact.values())
        self._judge("usage is what du tells", is_exact, {name: f"{one[0]} = {one[1]}" for name, one in exact.items()})

    def _make_progress(self) -> None:
        """A prompt that is stored now is hit now."""
        node = self.nodes[-1]
        config = Config.from_mapping(node.config())
        habits = Habits(Prompts(documents=1, endings=1, fresh=0.0), requests_max=1, hold_s=0.01)
        one = EngineTraffic(config, "progress", random.Random(self.plan.seed), habits)
        try:
            turn_until([one], lambda: one.counts["hit_chunks"] > 0, "a hit")
            self._judge(
                "what is stored now is hit", one.counts["wrong_chunks"] == 0, f"{one.counts['hit_chunks']} chunks"
            )
        finally:
            one.close()

    # -- verdicts ------------------------------------------------------------------------------------------------

    def _judge_memory(self, node: Node, half: int) -> None:
        """Of a server, without what it remembers by design: an entry for every chunk known, of a bounded number."""
        columns = {name: values[half:] for name, values in self.series[node.name].columns.items()}
        for who in ("server", "client"):
            known = columns["known"] if who == "server" else [0] * len(columns["t_s"])
            rows = [
                (time_s, size_kib / 1024 - chunks * KNOWN_CHUNK_MIB)
                for time_s, size_kib, chunks in zip(columns["t_s"], columns[f"{who}_anonymous_kib"], known, strict=True)
                if size_kib is not None and chunks is not None
            ]
            check = f"{who}: memory is flat in the second half"
            if len(rows) < SAMPLES_MIN:
                self._judge(check, self.plan.faults_s < 2 * SPAN_S, f"{len(rows)} samples are too few")
                continue
            found = trend([row[0] for row in rows], [row[1] for row in rows])
            self.trends[who] = found
            slope = "not judged" if found.slope_mib_per_h is None else f"{found.slope_mib_per_h:.1f} MiB/h"
            seen = f"{found.middle_mib:.1f} then {found.last_mib:.1f} MiB, slope {slope}"
            if who == "server":
                counts = [chunks for chunks in known if chunks is not None]
                seen += f"; besides {counts[0]} then {counts[-1]} chunks known"
            self._judge(check, found.is_flat, seen)

    def _end(self, others: set[int]) -> None:
        """Engines are told to end, servers are not: they end after them."""
        for node in self.nodes:
            node.end_clients()
            node.wait_server_ended()
        processes = set().union(*(node.processes for node in self.nodes))
        inodes = set().union(*(node.slab_inodes for node in self.nodes))
        with contextlib.suppress(TimeoutError):  # judged below; a server's file goes before its process does
            wait_for(lambda: not still_running(processes), "the last server's end", deadline_s=ENDED_S)
        alive = still_running(processes)
        left = sorted(set(children(os.getpid())) - others)
        self._judge("no process is left", not alive and not left, alive or left or f"{len(processes)} ended")
        holders = slab_holders(inodes)
        self._judge("no shared memory is left", not holders, holders or f"{len(inodes)} slabs were made")

    def _check_all_along(self) -> None:
        total = self.counts()
        self._judge(
            "no wrong byte",
            not total["wrong_chunks"] and total["compared_bytes"],
            f"{total['compared_bytes']} compared",
        )
        self._judge("there were hits", total["hit_chunks"], f"{total['hit_chunks']} of {total['asked_chunks']} chunks")
        self._judge(
            "disks and bucket stay within their limits", not self._over, self._over[:3] or f"{self._taken} samples"
        )
        seen = [problem for node in self.nodes for problem in node.problems]
        self._judge(
            "no verb and no engine crashed", not seen, seen[:3] or f"{sum(self.faults.values())} faults and verbs"
        )

    def counts(self) -> Counter[str]:
        """What all engines counted."""
        total: Counter[str] = Counter()
        for node in self.nodes:
            total.update(node.counts())
        return total


def _each(rows: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return {node: row[name] for node, row in rows.items()}


def _of_process(who: str, found: ProcessSample | None) -> dict[str, Any]:
    names = ("rss_kib", "anonymous_kib", "shared_kib", "threads", "descriptors", "slabs", "zombies")
    if found is None:
        return dict.fromkeys(f"{who}_{name}" for name in names)
    slabs = found.slabs_mapped
    values = (
        found.rss_kib,
        found.anonymous_kib,
        found.shared_kib,
        found.threads,
        found.descriptors,
        slabs,
        found.zombies,
    )
    return {f"{who}_{name}": value for name, value in zip(names, values, strict=True)}
