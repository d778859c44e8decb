"""What benchmarks report with."""

import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("share", "expected"), [(0.5, 500), (0.99, 990), (0.999, 999), (1.0, 1000)])
def test_a_percentile_is_of_the_share_that_was_asked_for(
    repository: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: int
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import bench_report

    assert bench_report.percentile(list(range(1000, 0, -1)), share) == expected
    assert bench_report.percentile([7.0], share) == 7.0
    del sys.modules["bench_report"]
