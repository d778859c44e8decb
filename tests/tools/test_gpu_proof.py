"""The proof for a GPU, checked without one: its sentence, its record, its dry run, and that it has power."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kit.gpu.device import simulated_gpu
from tests.kit.gpu.lives import read, write
from tests.kit.gpu.pools import Shape as SimulatedShape
from tests.kit.gpu.pools import uniform_pool
from tiered_kv.chunks.device_copy import CopyEngine
from tiered_kv.chunks.transfer import RankKV
from tools.gpu_proof import runner, shapes
from tools.gpu_proof.devices import ARRIVED, DONE, GATHERED, MARK, REUSE, WAITS, DryDevice, Leaky
from tools.gpu_proof.host_memory import MIB, HostMemory
from tools.gpu_proof.runner import SECTIONS, is_proven, keep, source_digest, table
from tools.gpu_proof.section import Proof, run_section
from tools.gpu_proof.sections import correctness, hazards
from tools.gpu_proof.world import WAYS, World

HAS_GPU = torch.cuda.is_available()
DRY = ("machine", "ceilings", "fragments", "pinning", "hazards", "sanitizer", "interference", "graphs")


def run(repository: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        (sys.executable, "-m", "tools.gpu_proof", *arguments),
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence_and_runs_nothing(repository: Path, tmp_path: Path) -> None:
    ended = run(repository, "--out", str(tmp_path / "proof.json"))
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "; the proof is of an NVIDIA GPU. Nothing was run." in line
    assert not (tmp_path / "proof.json").exists()


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_a_missing_package_is_named(repository: Path, tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError")
    ended = run(repository, PYTHONPATH=f"{tmp_path}{os.pathsep}{repository}")
    assert ended.returncode == 2
    assert f"this Python has no {package}" in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_section_that_is_not_there_is_said_and_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--dry", "machine", "hazzards"]) == 2
    said = capsys.readouterr()
    assert "there is no section hazzards; sections are machine," in said.err and said.out == ""


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "PYTHON_MIN", (9, 0))
    assert runner.main([]) == 2
    assert "Python 9.0 is needed" in capsys.readouterr().err


def test_it_needs_torch_and_numpy_and_nothing_else(repository: Path) -> None:
    """The machine with the GPU has no environment of ours."""
    modules = [f"tools.gpu_proof.sections.{section.name}" for section in SECTIONS]
    script = (
        "import sys, importlib, torch, numpy\n"
        "before = set(sys.modules)\n"
        f"for name in ['tools.gpu_proof.runner', *{modules!r}]: importlib.import_module(name)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - sys.stdlib_module_names))\n"
    )
    ended = subprocess.run(
        (sys.executable, "-c", script),
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(ended.stdout.split()) <= {"tiered_kv", "tools", "torch", "numpy"}


@pytest.fixture
def dry() -> Proof:
    return Proof("dry", torch.device("cpu"), is_dry=True)


@pytest.mark.parametrize("shape", shapes.REAL, ids=lambda shape: shape.name)
@pytest.mark.parametrize("way", WAYS)
def test_every_real_shape_is_copied_byte_for_byte_in_a_dry_run(dry: Proof, shape: shapes.Shape, way: str) -> None:
    made = World(dry, shape, pool_bytes=4096 * MIB, chunks=3)
    correctness._compare(dry, made, shape, way)
    made.close()
    assert dry.verdict == "right" and len(dry.checks) == 3, dry.checks


def test_a_byte_that_goes_wrong_makes_the_verdict_wrong(dry: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
    real = World.save

    def damaged(self: World, *arguments: object) -> object:
        job = real(self, *arguments)
        self.slot(1)[-1] ^= 1
        return job

    monkeypatch.setattr(World, "save", damaged)
    made = World(dry, shapes.REAL[4], pool_bytes=4096 * MIB, chunks=3)
    correctness._compare(dry, made, made.shape, "staged")
    assert dry.verdict == "wrong"
    assert [check.what for check in dry.checks if not check.passed] == [
        "Llama-8B, TP 8, staged: saved chunks are their pages"
    ]


def test_a_byte_beside_the_pages_is_noticed(dry: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
    real = World.load

    def damaged(self: World, *arguments: object, **options: object) -> object:
        job = real(self, *arguments, **options)
        self.raw[-1] ^= 1
        return job

    monkeypatch.setattr(World, "load", damaged)
    made = World(dry, shapes.REAL[4], pool_bytes=4096 * MIB, chunks=3)
    correctness._compare(dry, made, made.shape, "staged")
    assert "Llama-8B, TP 8, staged: loaded pages, and no byte beside them" in [
        c.what for c in dry.checks if not c.passed
    ]


def test_each_wait_of_the_engine_is_there_to_be_left_out(dry: Proof) -> None:
    hazards.run(dry)
    assert dry.verdict == "right"
    left_out = {row["wait"] for row in dry.rows if row["left_out"] and row["waits_left_out"]}
    assert left_out == set(WAITS)
    assert not any(row["waits_left_out"] for row in dry.rows if not row["left_out"])


@pytest.mark.parametrize("kind", ["", *WAITS])
def test_only_the_wait_that_is_named_is_left_out(dry: Proof, kind: str) -> None:
    """Every wait of a save and a load, by who waits for what."""
    device = DryDevice()
    leaky = Leaky(device, kind)
    seen: list[str] = []
    whole = leaky.is_left_out

    def watched(asked: str) -> bool:
        seen.append(asked)
        return whole(asked)

    leaky.is_left_out = watched  # type: ignore[method-assign]
    made = World(dry, shapes.REAL[4], pool_bytes=4096 * MIB, chunks=3)
    rank = made.engine("staged", ring_slices=2, device=leaky)
    for begin in (made.save, made.load):
        job = begin(rank, leaky.mark())
        with leaky.last_wait():
            job.wait()
    assert set(seen) == {MARK, GATHERED, ARRIVED, REUSE, DONE}
    assert leaky.left_out == seen.count(kind) and (leaky.left_out > 0) == bool(kind)
    waited = sum(len(stream.waited) for _, stream in leaky.streams)
    assert waited == sum(seen.count(name) for name in (MARK, GATHERED, ARRIVED) if name != kind)


def test_the_engine_knows_no_wait_that_the_proof_does_not() -> None:
    """A wait that is added to the engine has to be left out by the proof, too."""
    source = Path(sys.modules[CopyEngine.__module__].__file__ or "").read_text()
    assert source.count(".wait_event(") == 5, "marks of saves and loads and of direct loads, gathered, arrived"
    assert source.count("free.synchronize()") == 1 and source.count("_done.synchronize()") == 1


@pytest.mark.parametrize("name", DRY)
def test_a_section_runs_dry(tmp_path: Path, name: str) -> None:
    record = tmp_path / "record.json"
    assert run_section(name, record, is_dry=True, is_quick=False) == 0
    kept = json.loads(record.read_text())
    assert kept["verdict"] in ("right", "measured") and kept["headline"]


def test_a_dry_run_says_so_and_is_not_run_again_on_the_same_sources(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    ended = run(repository, "--dry", "--out", str(out), "machine")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads(out.read_text())
    assert record["is_dry"] and record["sections"]["machine"]["verdict"] == "measured"
    again = run(repository, "--dry", "--out", str(out), "machine")
    assert "skipped" in again.stdout and again.returncode == 0


def test_a_section_that_fails_or_hangs_takes_no_other_one_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = (runner.Section("graphs", 0, "hangs"), runner.Section("machine", 600, "runs"))
    monkeypatch.setattr(runner, "SECTIONS", sections)
    monkeypatch.setattr(runner, "LIMIT_MIN_S", 0.01)  # before its interpreter runs: a quick machine is through in 1 s
    out = tmp_path / "proof.json"
    assert runner.main(["--dry", "--out", str(out)]) == 1
    kept = json.loads(out.read_text())
    assert kept["sections"]["graphs"]["verdict"] == "failed" and "hung" in kept["sections"]["graphs"]["headline"]
    assert kept["sections"]["machine"]["verdict"] == "measured" and kept["exit_code"] == 1
    assert "failed" in capsys.readouterr().out


def section_record(**changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "verdict": "right",
        "headline": "",
        "checks": [],
        "rows": [],
        "source": source_digest(),
        "is_quick": False,
        "on": {"gpu": "a", "torch": "2"},
    }
    return fields | changes


@pytest.mark.parametrize(
    ("changes", "is_quick", "stands"),
    [
        ({}, False, True),
        ({"verdict": "measured"}, False, True),
        ({"verdict": "wrong"}, False, False),
        ({"source": "other"}, False, False),
        ({"on": {"gpu": "b", "torch": "2"}}, False, False),
        ({"is_quick": True}, False, False),
        ({"is_quick": True}, True, True),
    ],
)
def test_a_record_stands_for_the_same_sources_gpu_and_size(
    changes: dict[str, object], is_quick: bool, stands: bool
) -> None:
    assert is_proven(section_record(**changes), {"gpu": "a", "torch": "2"}, is_quick=is_quick) is stands


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_whole": False}, "not everything"),
        ({"exit_code": 1}, "wrong"),
        ({"is_dirty": True}, "differ"),
        ({"commit": None}, "--commit"),
    ],
)
def test_only_a_whole_right_record_of_a_commit_goes_into_the_proofs(
    changes: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    whole = {"is_whole": True, "exit_code": 0, "is_dirty": False, "commit": "abc"}
    assert why in keep(whole | changes) and not list(tmp_path.iterdir())
    assert "kept as docs/proofs/gpu.json" in keep(whole)
    assert json.loads((tmp_path / "docs/proofs/gpu.json").read_text())["commit"] == "abc"


def test_the_table_says_what_is_wrong_and_what_was_not_reached() -> None:
    wrong = section_record(verdict="wrong", checks=[{"what": "bytes", "passed": False, "seen": "3"}])
    text = "\n".join(table({"machine": wrong}, SECTIONS[:2]))
    assert "wrong: bytes. seen=3" in text and "not reached" in text


class Driver:
    """Notes what is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, size: int) -> None:
        assert address not in self.registered
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]


def test_memory_is_pinned_in_windows_as_the_cache_does_and_let_go_of_before_it_is_unmapped() -> None:
    driver, window = Driver(), 4 * MIB
    memory = HostMemory(10 * MIB, is_populated=False)
    memory.register(driver, window_bytes=window)  # type: ignore[arg-type]
    parts = sorted(driver.registered.items())
    assert [address for address, _ in parts[1:]] == [sum(part) for part in parts[:-1]], "one behind the other"
    assert parts[0][0] == memory.address and sum(size for _, size in parts) == memory.size
    assert all(address // window == (address + size - 1) // window for address, size in parts)
    memory.close()
    assert driver.registered == {}
    memory.close()


def test_places_of_pages_are_where_the_views_have_them() -> None:
    """The reference of ``correctness`` goes by these places, so they are checked against the tensors' elements."""
    for shape in shapes.REAL:
        small = shape.scaled(2)
        raw = torch.arange(3 * small.block_bytes, dtype=torch.int64).to(torch.uint8)
        seen = np.zeros(raw.numel(), dtype=int)
        for placed in shapes.place(raw, small, 3):
            for block in range(3):
                where = placed.bytes_of(block)
                seen[where] += 1
                view = placed.tensor[block]
                ordered = view if placed.page.axes == "HNC" else view.transpose(0, 1)
                assert ordered.contiguous().view(torch.uint8).flatten().equal(raw[where])
        assert (seen == 1).all(), "every byte of the allocation is in one page"


def life_without(wait: str, *, is_direct: bool) -> list[str]:
    """Save and load a few chunks on a simulated GPU with one wait left out; the races that were found."""
    with simulated_gpu() as machine:
        pool = uniform_pool(SimulatedShape("LBNHC", 3, 2, 4, 8), 40, 0)
        machine.detector.device_memory(pool.raw)
        leaky = Leaky(machine.device(), wait)
        engine = CopyEngine(leaky, slice_bytes=216, ring_slices=2, direct_bytes=1 if is_direct else 1 << 40)  # type: ignore[arg-type]
        rank = RankKV([pool.pages], pool.tensors, [4], engine=engine)
        chunks, others = [(3, 1, 2, 7), (5, 6, 8, 9)], [(20, 11, 12, 13), (15, 30, 17, 18)]
        slots = torch.zeros(len(chunks), rank.rank_bytes, dtype=torch.uint8)
        machine.detector.host_memory(slots)
        for ids in chunks:
            write(pool, ids)
        job = rank.begin("save", leaky.mark())
        for ids, slot in zip(chunks, slots, strict=True):
            rank.gather([ids], memoryview(slot.numpy()), job)
        job.launch()
        with leaky.last_wait():
            job.wait()
        slots.clone()  # the cache's server reads them
        slots.fill_(7)  # and they are filled from disk
        for ids in others:
            write(pool, ids)
        job = rank.begin("load", leaky.mark())
        for ids, slot in zip(others, slots, strict=True):
            rank.scatter(memoryview(slot.numpy()), [(0, ids)], job)
        job.launch()
        with leaky.last_wait():
            job.wait()
        for ids in others:
            read(pool, ids)
        return list(machine.detector.races)


@pytest.mark.parametrize("is_direct", [False, True], ids=WAYS)
def test_without_a_wait_left_out_nothing_races(is_direct: bool) -> None:
    assert life_without("", is_direct=is_direct) == []


@pytest.mark.parametrize(
    ("wait", "is_direct"), [(wait, way) for wait in WAITS for way in (False, True) if (wait, way) != (REUSE, True)]
)
def test_each_wait_that_the_proof_leaves_out_is_a_race(wait: str, is_direct: bool) -> None:
    """What the GPU has to show by wrong bytes, the race detector shows whatever the timing."""
    assert life_without(wait, is_direct=is_direct)
