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


@pytest.mark.timeout(400)
def test_oldest_supported_vllm_passes_the_connector_suite(repository: Path) -> None:
    overlay = repository / ".cache" / f"vllm-{OLDEST}"
    if not (overlay / "complete").exists():
        pytest.fail(f"vLLM {OLDEST} is not there: run scripts/overlay {OLDEST}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(overlay), str(repository)])}
    version = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__version__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "tests/e2e/test_connector.py"],
        env=environment, cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert version.stdout.strip() == OLDEST
    assert suite.returncode == 0, suite.stdout[-4000:]
