"""The oldest vLLM of the supported window passes the same end-to-end suite as the newest (rule 13).

The older one is laid over the installed one by PYTHONPATH; ``scripts/overlay 0.30.0`` puts it there and ``make test``
calls that first.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

OLDEST = "0.30.0"
SUITE = """
import sys, pytest
status = pytest.main(sys.argv[1:])
import vllm
print("vLLM", vllm.__version__, flush=True)
sys.exit(status)
"""
"""What ran says by itself which version that was: another process for it would import vLLM again."""


@pytest.mark.timeout(400)
def test_oldest_supported_vllm_passes_the_connector_suite(repository: Path) -> None:
    overlay = repository / ".cache" / f"vllm-{OLDEST}"
    if not (overlay / "complete").exists():
        pytest.fail(f"vLLM {OLDEST} is not there: run scripts/overlay {OLDEST}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(overlay), str(repository)])}
    suite = subprocess.run(
        [sys.executable, "-c", SUITE, "-q", "--show-capture=no", "tests/e2e/test_connector.py"],
        env=environment, cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert suite.returncode == 0, suite.stdout[-4000:]
    assert f"vLLM {OLDEST}" in suite.stdout.splitlines()
