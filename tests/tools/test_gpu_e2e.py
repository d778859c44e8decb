"""``make gpu-e2e`` checked without a GPU: what it says where it cannot run, how it judges, and a run on the CPU."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import only_in_proofs
from tools.gpu_e2e import modes, runner
from tools.gpu_e2e.modes import CPU, CUDA, EAGER, MODES, ROLES, SCENARIOS, Mode
from tools.gpu_proof.runner import source_digest


def run(repository: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        (sys.executable, "-m", "tools.gpu_e2e", *arguments),
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("package", "sentence"),
    [
        ("torch", "this Python has no torch. Nothing was run."),
        ("vllm", "scripts/pack-vllm packs one for a machine without a network. Nothing was run."),
        ("rich", "this Python lacks a package of tiered_kv"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(repository: Path, tmp_path: Path, package: str, sentence: str) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('not here')")
    out = tmp_path / "e2e.json"
    # The package's folder comes first, also for the probe's process, which puts the repository in front.
    (tmp_path / "usercustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    ended = run(repository, "--out", str(out), PYTHONPATH=f"{tmp_path}{os.pathsep}{repository}")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert sentence in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not out.exists()


def phase(name: str, **changes: Any) -> dict[str, Any]:
    cached, read = (0, {}) if name == "cold" else (1_024, {"disk": 5 if name == "warm_disk" else 0})
    fields = {
        "name": name,
        "prompt_tokens": 1_140,
        "cached_tokens": cached,
        "ttft_s": 1.0,
        "tokens_equal": True,
        "kv_bytes_equal": True,
        "read_bytes": read,
    }
    return fields | changes


NAMES = ("cold", "warm_host", "warm_disk", "warm_other_suffix")


def test_a_right_run_is_right_however_long_it_took() -> None:
    found = runner.judged([phase(name) for name in NAMES], SCENARIOS["tiny"])
    assert found["verdict"] == "right" and found["broken"] == []


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("cold", {"cached_tokens": 16}, "it was not cold"),
        ("cold", {"tokens_equal": False}, "differs from plain vLLM's"),
        ("warm_host", {"cached_tokens": 512}, "only 512 of 1100"),
        ("warm_host", {"tokens_equal": False}, "differs from plain vLLM's"),
        ("warm_host", {"kv_bytes_equal": False}, "the loaded KV differs"),
        ("warm_host", {"read_bytes": {"disk": 5}}, "read from ['disk'], not from host memory"),
        ("warm_disk", {"read_bytes": {"disk": 0}}, "read from no tier, not from disk"),
        ("warm_disk", {"kv_bytes_equal": None}, "the loaded KV differs"),
        ("warm_other_suffix", {"tokens_equal": False}, "differs from plain vLLM's"),
    ],
)
def test_each_broken_promise_makes_the_mode_wrong(name: str, changes: dict[str, Any], says: str) -> None:
    phases = [phase(one, **(changes if one == name else {})) for one in NAMES]
    found = runner.judged(phases, SCENARIOS["tiny"])
    assert found["verdict"] == "wrong" and any(says in line for line in found["broken"]), found["broken"]


def test_an_engine_that_does_not_start_fails_its_mode_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "FILES", tmp_path / "files")
    monkeypatch.setattr(runner, "MODES", (Mode("first", CPU), Mode("second", CPU)))
    monkeypatch.setattr(runner, "ENGINE", "no_such_engine")
    monkeypatch.setattr(runner, "probe", lambda: {"platform": "cpu", "gpu": "none"})
    out = tmp_path / "e2e.json"
    assert runner.main(["--out", str(out), "--model-dir", str(tmp_path / "models")]) == 1
    kept = json.loads(out.read_text())
    assert kept["exit_code"] == 1 and list(kept["modes"]) == ["first", "second"]
    for mode in kept["modes"].values():
        assert mode["verdict"] == "failed" and mode["broken"][0] == "plain: the engine ended with status 1"
        assert "no_such_engine" in "".join(mode["broken"])
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "is_run"),
    [({}, False), ({"source": "other"}, True), ({"verdict": "wrong"}, True), ({"scenario": {"model": "DEMO"}}, True)],
)
def test_a_mode_that_is_right_on_these_sources_is_not_run_again(
    changes: dict[str, Any], is_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"platform": "cpu", "gpu": "none"}
    right = {"verdict": "right", "broken": [], "phases": [], "duration_s": 1.0, "options": {}}
    ran: list[str] = []
    monkeypatch.setattr(runner, "probe", lambda: machine)
    monkeypatch.setattr(runner, "run_mode", lambda mode, *_: ran.append(mode.name) or dict(right))
    monkeypatch.setattr(runner, "_build_model", lambda _, folder: folder)
    out = tmp_path / "e2e.json"
    scenario = asdict(SCENARIOS["tiny"])
    kept = right | {"source": source_digest(runner.SOURCES), "on": machine, "scenario": scenario} | changes
    out.write_text(json.dumps({"modes": {"cpu-eager": kept}}))
    assert runner.main(["--out", str(out)]) == 0
    assert bool(ran) is is_run
    ran.clear()
    assert runner.main(["--out", str(out), "--force"]) == 0 and ran == ["cpu-eager"]


@pytest.mark.parametrize("asked", [["graphs"], ["cpu-eager", "graphs"]])
def test_a_mode_that_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    monkeypatch.setattr(runner, "probe", lambda: {"platform": "cpu", "gpu": "none"})
    assert runner.main(asked) == 2
    assert "there is no mode graphs on cpu; modes are cpu-eager. Nothing was run." in capsys.readouterr().err


def test_the_modes_cover_what_was_never_run() -> None:
    on_gpu = [mode for mode in MODES if mode.device == CUDA]
    options = [dict(mode.options) for mode in on_gpu]
    assert {option.get("enforce_eager", False) for option in options} == {True, False}
    assert {option.get("attention_backend") for option in options} == {None, "FLASH_ATTN", "TRITON_ATTN"}
    assert {option.get("kv_cache_dtype") for option in options} == {None, "fp8"}
    assert {mode.environment.get("VLLM_USE_V2_MODEL_RUNNER") for mode in on_gpu} == {None, "0", "1"}
    assert len({mode.name for mode in MODES}) == len(MODES)
    first = ["eager", "graphs", "fp8-graphs", "triton-graphs", "flash-v2-graphs"]
    assert [mode.name for mode in on_gpu][: len(first)] == first


def test_prompts_share_the_document_and_nothing_else() -> None:
    scenario = SCENARIOS["tiny"]
    one, other = scenario.prompt(0), scenario.prompt(1)
    assert one[: scenario.shared_tokens] == other[: scenario.shared_tokens] and one != other
    assert len({tuple(scenario.warm_up_prompt(role)[:16]) for role in ROLES} | {tuple(one[:16])}) == 4
    assert max(one) < scenario.vocabulary and modes.connector(Path("/x"), CPU)["strict"]


def test_a_mode_that_begins_too_late_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "probe", lambda: {"platform": "cpu", "gpu": "none"})
    monkeypatch.setattr(runner, "_build_model", lambda _, folder: folder)
    assert runner.main(["--out", str(tmp_path / "e2e.json"), "--budget-s", "-1"]) == 1
    said = capsys.readouterr().out
    assert "cpu-eager: no time left; run again" in said and "not reached" in said


def test_a_model_that_cannot_be_built_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "probe", lambda: {"platform": "cpu", "gpu": "none"})
    (tmp_path / "models").write_text("a file")
    assert runner.main(["--out", str(tmp_path / "e2e.json"), "--model-dir", str(tmp_path / "models")]) == 2
    said = capsys.readouterr().err
    assert "the model cannot be built in" in said and "Not a directory" in said and "Nothing was run." in said


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_so_many_modes_at_once_is_a_whole_number(capsys: pytest.CaptureFixture[str], count: str) -> None:
    with pytest.raises(SystemExit):
        runner.main([f"--at-once={count}"])
    assert f"a whole number from 1 on is expected, not {count!r}" in capsys.readouterr().err


def test_a_commit_that_is_given_is_the_record_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "git", lambda *_: None)
    found = runner.summary({}, {}, CUDA, "abc")
    assert found["commit"] == "abc" and not found["is_dirty"]
    assert runner.summary({}, {}, CUDA)["commit"] is None


INTERRUPTED = """
import sys
from dataclasses import asdict
from pathlib import Path
from tools.gpu_e2e import __main__, runner
from tools.gpu_e2e.modes import CPU, Mode
folder = Path(sys.argv[1])
runner.FILES, runner.ENGINE = folder / "files", "sleeper"
runner.MODES = (Mode("one", CPU), Mode("two", CPU), Mode("three", CPU))
runner.probe = lambda: {"platform": "cpu", "gpu": "none"}
runner._build_model = lambda *_: folder
sys.exit(__main__.run(["--at-once", "2", "--out", str(folder / "e2e.json")]))
"""

SLEEPER = """
import os, signal, sys, time
from dataclasses import asdict
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as an engine that is busy in a kernel
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_engines_and_starts_no_other(
    repository: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    paths = os.pathsep.join((str(repository), str(tmp_path)))
    process = subprocess.Popen(
        (sys.executable, "-c", INTERRUPTED, str(tmp_path)),
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    logs = [tmp_path / "files" / name / "plain.log" for name in ("one", "two")]
    while process.poll() is None and not all(log.is_file() and log.read_text().endswith("\n") for log in logs):
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == runner.INTERRUPTED, said
    assert "one begins" in said and "two begins" in said and "three" not in said and "Traceback" not in said
    for log in logs:
        with pytest.raises(ProcessLookupError):
            os.kill(int(log.read_text().split()[1]), 0)
    assert not (tmp_path / "files" / "three").exists()


@only_in_proofs  # what it runs is proven elsewhere; it is run before a GPU is
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [("one",), ("one", "two")], ids=len)
def test_the_cpu_mode_is_right_from_end_to_end_also_beside_itself(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "FILES", tmp_path / "files")
    monkeypatch.setattr(runner, "MODES", tuple(Mode(name, CPU, EAGER) for name in names))
    out = tmp_path / "e2e.json"
    status = runner.main(["--at-once", "2", "--out", str(out), "--model-dir", str(tmp_path / "models")])
    said = capsys.readouterr().out
    assert status == 0, said
    lines = [line.partition(" after ")[0] for line in said.splitlines()]
    assert {*lines[: len(names)]} == {f"gpu-e2e: {name} begins" for name in names}
    assert {*lines[len(names) : 2 * len(names)]} == {f"gpu-e2e: {name}: right" for name in names}
    ended = json.loads(out.read_text())["modes"]
    assert set(ended) == set(names)
    for mode in ended.values():
        assert mode["verdict"] == "right" and [found["name"] for found in mode["phases"]] == list(NAMES)
        assert mode["engine"]["kv_layout"] == "LBHNC"


LIBRARIES = (
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/_C_stable_libtorch.abi3.so",
)


def pack(repository: Path, tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run scripts/pack-vllm with real pip, whose only index is the folder ``index``."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
    }
    command = (repository / "scripts" / "pack-vllm", *arguments)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def wheel(path: Path, *names: str, requires: tuple[str, ...] = (), extras: tuple[str, ...] = ()) -> Path:
    """A wheel that pip takes, with these files."""
    path.parent.mkdir(exist_ok=True)
    package, version = path.name.split("-")[:2]
    metadata = [f"Metadata-Version: 2.4\nName: {package}\nVersion: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {text}" for text in requires]
    files = {name: name for name in names} | {
        f"{package}-{version}.dist-info/METADATA": "\n".join([*metadata, ""]),
        f"{package}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{package}-{version}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def piplist(repository: Path, path: Path, *lines: str) -> Path:
    """What a machine has that lacks nothing of ours but msgspec, its lines joined."""
    ours = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {text.partition(">")[0] for text in ours} - {"msgspec", "s3fs", "aiobotocore", "botocore"}
    path.write_text(";".join(["Package Version", "------- -------", *lines, *(f"{name} 9999" for name in names)]))
    return path


def test_vllm_is_packed_with_what_the_machine_lacks_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    wheel(index / "msgspec-1.0-py3-none-any.whl")
    wheel(index / "alpha-1.0-py3-none-any.whl")
    # It asks for what the machine has in another version, and for what is left out.
    wheel(index / "alpha-2.0-py3-none-any.whl", requires=("beta[more]", "numpy<2", "torch==9", "tilelang"))
    wheel(index / "alpha-3.0-py3-none-any.whl")
    needs = ('gamma; extra == "more"', 'delta; extra == "other"', 'delta; python_version < "3.12"')
    wheel(index / "beta-1.0-py3-none-any.whl", requires=needs, extras=("more", "other"))
    wheel(index / "gamma-1.0-cp312-cp312-manylinux_2_28_x86_64.whl")
    made = wheel(
        tmp_path / "vllm-0.32.0-py3-none-any.whl",
        *(*LIBRARIES, "vllm/__init__.py", "vllm/_moe_C.abi3.so"),
        requires=("alpha<3,>=1", "Tokenizers>=0.5", 'delta; sys_platform == "win32"', "torch==10"),
    )
    has = piplist(repository, tmp_path / "list", "numpy 2.5.2", "torch 2.11.0", "tokenizers 0.23.2")
    ended = pack(repository, tmp_path, str(made), str(tmp_path / "out"), str(has))
    assert ended.returncode == 0, ended.stderr
    packed = {}
    for archive in sorted((tmp_path / "out").rglob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            packed[str(archive.relative_to(tmp_path / "out"))] = {n.removeprefix("./") for n in tar.getnames()}
    info = {f"vllm-0.32.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")}
    assert packed == {
        "one/flash_attention.tar.xz": set(LIBRARIES[:2]),
        "one/python.tar.xz": {"vllm/__init__.py", *info},
        "two/operators.tar.xz": {LIBRARIES[2]},
    }
    wheels = {path.name.rpartition("-py3")[0] or path.name for path in (tmp_path / "out" / "one").glob("*.whl")}
    assert wheels == {"msgspec-1.0", "alpha-2.0", "beta-1.0", "gamma-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"}
    said = ended.stderr.splitlines()
    assert "the machine's is taken: numpy: alpha asks for <2, the machine has 2.5.2" in said
    assert "the machine's is taken: torch: vllm asks for ==10, the machine has 2.11.0" in said
    assert any(line.startswith("left out, the machine has none: tilelang: ") for line in said)
    assert not any("tokenizers" in line or "delta" in line for line in said)


@pytest.mark.parametrize(
    ("vllm", "listed", "says"),
    [
        (None, "pip 24.0", "no such file"),
        (("vllm/__init__.py",), "pip 24.0", "another version lays its libraries out otherwise"),
        (LIBRARIES, "bash: pip: not found", "lines of `pip list` are expected"),
        (LIBRARIES, "torch 2.11.0", "pip finds no versions that all requirements take"),
    ],
    ids=["no wheel", "another wheel", "no list", "not in the index"],
)
def test_what_cannot_be_packed_is_said(
    repository: Path, tmp_path: Path, vllm: tuple[str, ...] | None, listed: str, says: str
) -> None:
    path = tmp_path / "vllm-0.32.0-py3-none-any.whl"
    if vllm is not None:
        wheel(path, *vllm)
    (tmp_path / "index").mkdir()
    (tmp_path / "list").write_text(listed)
    ended = pack(repository, tmp_path, str(path), str(tmp_path / "out"), str(tmp_path / "list"))
    assert ended.returncode == 1 and says in ended.stderr and "Traceback" not in ended.stderr


def test_packing_without_arguments_shows_the_usage(repository: Path, tmp_path: Path) -> None:
    ended = pack(repository, tmp_path)
    assert ended.returncode == 1 and ended.stderr.startswith("usage: scripts/pack-vllm WHEEL DEST PIPLIST")


def test_the_check_says_what_ended_the_engine_not_what_was_written_behind_it() -> None:
    log = """[rank0]:   File "vllm/utils.py", line 7, in <module>
[rank0]: ModuleNotFoundError: No module named 'compressed_tensors'
[rank0]:[W1126 18:49:25.520969597 ProcessGroupNCCL.cpp:1575] Warning: an Error may follow
torch.OutOfMemoryError: CUDA out of memory
gpu-e2e: no Error of its own"""
    assert [bool(runner.RAISED.match(line)) for line in log.splitlines()] == [False, True, False, True, False]


@only_in_proofs
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_the_check_starts_an_engine_and_names_what_one_lacks(repository: Path, tmp_path: Path) -> None:
    """A package that vLLM imports when it loads a model: its own import, and the platform, do not miss it."""
    models = ("--model-dir", str(tmp_path / "models"))
    there = run(repository, "--check", *models)
    assert there.returncode == 0 and "the modes can be run" in there.stdout, there.stdout + there.stderr
    package = tmp_path / "late" / "compressed_tensors"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('not here: compressed_tensors')")
    (tmp_path / "late" / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(package.parent)!r})")
    missing = run(repository, "--check", *models, PYTHONPATH=f"{package.parent}{os.pathsep}{repository}")
    assert missing.returncode == 2, missing.stdout + missing.stderr
    (sentence,) = missing.stderr.splitlines()
    assert "no engine can run here" in sentence and "not here: compressed_tensors" in sentence
