"""vLLM's own tests of the tiers below its offloading, with ours in the place of theirs.

They are fetched from vLLM's source archive and run as they are, in a process with the plugin
``tests/kit/vllm/their_tiers.py``. ``tests/golden/vllm_tier_tests.json`` says which of them pass, and why the others are
left out; docs/offloading.md has that in short. Each that runs has to make a tier of ours.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from vllm_own_tests import VERSION, fetch

from tests.kit.counts import only_in_proofs

pytestmark = [pytest.mark.vllm, only_in_proofs]


@pytest.mark.timeout(400)
def test_their_tests_of_tiers_pass_with_ours(repository: Path, tmp_path: Path) -> None:
    theirs = repository / ".cache" / f"vllm-{VERSION}-tests"
    fetch(theirs)
    outcomes = json.loads((repository / "tests" / "golden" / "vllm_tier_tests.json").read_text())
    files = sorted(path.name for path in theirs.glob("test_*.py"))
    run = [name for name in files if name not in outcomes["files_left_out"]]
    report = tmp_path / "report.xml"

    suite = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(theirs), "-p", "no:cacheprovider"),
            *("-p", "tests.kit.vllm.their_tiers", "-q", "--show-capture=no", "--junit-xml", str(report)),
            *("--basetemp", str(tmp_path / "theirs"), *(str(theirs / name) for name in run)),
        ],
        env=os.environ | {"PYTHONPATH": str(repository)}, cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert suite.returncode == 0, suite.stdout[-4000:] + suite.stderr[-2000:]
    assert set(files) - set(run) == set(outcomes["files_left_out"])
    assert passed(report) == outcomes["passed"]


def passed(report: Path) -> dict[str, int]:
    """How many cases of each test passed; pytest said that none failed."""
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    names = [(case.get("classname", "").split("."), case.get("name", "").partition("[")[0]) for case in cases]
    return dict(Counter("::".join([f"{place[0]}.py", *place[1:], name]) for place, name in names))
