"""How long rows below vLLM's offloading wait, for tests that say nothing of it: longer than a busy machine is late.

A store that gets no slot, or none of whose rows is written, is given up after 2 s, and is a miss then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiered_kv.vllm import row_jobs

TIMES = 15


@contextmanager
def patient_rows() -> Iterator[None]:
    """No row of this process is given up because the server or the disk is late."""
    with pytest.MonkeyPatch.context() as patch:
        for wait in ("SLOT_WAIT_S", "WRITE_WAIT_S", "WRITE_LAST_S"):
            patch.setattr(row_jobs, wait, TIMES * getattr(row_jobs, wait))
        yield
