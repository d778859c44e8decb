"""The wheel and the sdist: built, installed where nothing of this checkout is on the path, and used."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tiered_kv import __version__

pytestmark = pytest.mark.timeout(400)
"""The first test waits for pip, which takes two minutes of a busy machine."""

REPOSITORY = Path(__file__).parents[2]

ENGINE = """
import sys, json
from pathlib import Path
import tiered_kv
assert Path(tiered_kv.__file__).is_relative_to(sys.prefix), tiered_kv.__file__
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
model, cache = sys.argv[1:]
settings = {"storage_uri": f"file://{cache}", "lookup_timeout_ms": 20_000, "promotion_wait_ms": 20_000}  # if it is busy
transfer = KVTransferConfig(kv_connector="TieredKVConnector", kv_role="kv_both", kv_connector_extra_config=settings)
llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, block_size=32, max_model_len=1024,
          dtype="float32", kv_transfer_config=transfer)
prompt = {"prompt_token_ids": [7 + i % 900 for i in range(700)]}
sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
answers = []
for _ in range(2):
    (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
    answers.append([list(answer.outputs[0].token_ids), answer.num_cached_tokens])
    import time
    end = time.monotonic() + 30
    while llm.reset_prefix_cache() is not True and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
print(json.dumps(answers))
llm.llm_engine.engine_core.shutdown()
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two files by kind, built from a copy of what git would give a clone."""
    place = tmp_path_factory.mktemp("dist")
    source = place / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(source)],
        check=True,
        capture_output=True,
    )
    wheel, sdist = sorted((place / "dist").iterdir(), key=lambda path: path.suffix != ".whl")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def clean(dist: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel and what it asks for, and nothing else."""
    place = tmp_path_factory.mktemp("clean")
    venv.create(place)
    python = place / "bin" / "python"
    # Of what the wheel asks for, little is ever imported: what is, is compiled then.
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", dist["wheel"]]
    subprocess.run(command, check=True, env=outside())
    return python


def outside() -> dict[str, str]:
    """The environment of somebody who has no checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(python: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=outside(), check=False
    )


def test_wheel_and_sdist_have_the_package_and_its_licence(dist: dict[str, Path]) -> None:
    stem = f"tiered_kv-{__version__}"
    assert dist["wheel"].name == f"{stem}-py3-none-any.whl"
    assert dist["sdist"].name == f"{stem}.tar.gz"
    in_wheel = set(zipfile.ZipFile(dist["wheel"]).namelist())
    ours = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tiered_kv").rglob("*.py")}
    assert ours | {"tiered_kv/py.typed"} <= in_wheel
    assert {name.split("/")[0] for name in in_wheel} == {"tiered_kv", f"{stem}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)
    with tarfile.open(dist["sdist"]) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert ours | {"LICENSE", "README.md", "pyproject.toml"} <= in_sdist


def test_a_clean_install_serves_without_torch(clean: Path, tmp_path: Path) -> None:
    found = run(clean, "-c", "import torch", cwd=tmp_path)
    assert found.returncode != 0, "this is no clean environment"
    tool = clean.with_name("tiered-kv")
    version = subprocess.run(
        [tool, "--version"], capture_output=True, text=True, cwd=tmp_path, env=outside(), check=True
    )
    assert __version__ in version.stdout
    serving = subprocess.Popen(
        [tool, "serve", f"file://{tmp_path}/kv", "--host-bytes", "64MiB", "--disk-bytes", "256MiB"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=outside(),
    )  # fmt: skip
    try:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        assert line.startswith("serving ")
        socket = line.split("socket=")[1].split()[0]
        stat = run(clean, "-m", "tiered_kv.cli", "stat", "--server", socket, "--json", cwd=tmp_path)
        assert json.loads(stat.stdout)["server"]["version"] == __version__
    finally:
        serving.terminate()
        serving.communicate(timeout=60)
    assert serving.returncode == 0


def test_the_plugin_is_found_by_its_entry_point(clean: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.metadata import entry_points; "
        "print([e.value for e in entry_points(group='vllm.general_plugins', name='tiered_kv')])"
    )
    assert run(clean, "-c", code, cwd=tmp_path).stdout.strip() == "['tiered_kv.vllm.plugin:register']"


def test_extras_are_what_they_are_called(dist: dict[str, Path]) -> None:
    with zipfile.ZipFile(dist["wheel"]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        lines = wheel.read(name).decode().splitlines()
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert {"vllm", "test", "bench", "docs"} <= extras
    wanted = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" in line]
    (vllm,) = [line for line in wanted if 'extra == "vllm"' in line and "vllm>=" in line]
    assert "<" not in vllm, "a new vLLM is looked at when an engine starts, not refused by its number"
    needed = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert not any(name in line for line in needed for name in ("torch", "vllm"))


@pytest.mark.vllm
def test_the_installed_wheel_serves_a_vllm_engine_by_the_plugins_name(
    clean: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """vLLM and torch are borrowed from this environment, which has the checkout's tiered_kv: the wheel's must win."""
    (packages,) = [path for path in map(Path, sys.path) if path.name == "site-packages" and (path / "vllm").is_dir()]
    (own,) = (clean.parent.parent / "lib").glob("python*/site-packages")
    (own / "borrowed.pth").write_text(f"{packages}\n")  # a path alone: its own .pth files are not read
    environment = outside() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    try:
        done = subprocess.run(
            [clean, "-c", ENGINE, str(tiny_model), str(tmp_path / "kv")],
            capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
        )  # fmt: skip
    finally:
        (own / "borrowed.pth").unlink()
    assert done.returncode == 0, done.stderr[-4000:]
    (cold, cold_hits), (warm, warm_hits) = json.loads(done.stdout.splitlines()[-1])
    assert (cold_hits, warm_hits) == (0, 512)
    assert cold == warm
