"""What starts without torch and vLLM stays so: a CLI that takes five seconds to say --help is not used."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

HEAVY = ("torch", "vllm", "transformers", "numpy")

REPORT = f"""
found = sorted(set(sys.modules) & set({HEAVY!r}))
sys.exit("imported: " + ", ".join(found) if found else 0)
"""

CASES = {
    "the package": "import sys, tiered_kv",
    "the server": "import sys, tiered_kv.server.server, tiered_kv.server.client",
    "tiered-kv --help": """
import sys
from tiered_kv.cli.main import main
sys.argv = ["tiered-kv", "--help"]
try:
    main()
except SystemExit as ended:
    if ended.code:
        raise
""",
}


@pytest.mark.parametrize("case", CASES)
def test_starts_without_torch_or_vllm(case: str) -> None:
    # A process of its own: in this one, other tests have imported torch already.
    result = subprocess.run(
        [sys.executable, "-c", CASES[case] + REPORT], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_a_heavy_import_would_be_noticed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import sys, numpy" + REPORT], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.strip() == "imported: numpy"


def test_vllm_finds_the_connector_by_name() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="tiered_kv")
    assert callable(plugin.load())
