"""How processes of tests that become engines start: vLLM imported without the garbage collector, and once.

Called by ``harness.py``, by whoever has vLLM configured, and by modules that are processes of their own, which must not
import the harness: it sets the environment of an engine in its caller's process.
"""

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@functools.cache
def import_vllm() -> None:
    """Import vLLM, and keep the garbage collector from the objects of its and torch's modules, 600,000.

    Among them each collection takes 0.25 to 0.5 s, and vLLM makes five per start and one per end. While they are made
    the collector looks at them so often that it takes a fifth of the import.
    """
    gc.disable()
    try:
        from vllm import LLM  # noqa: F401 - for what it brings
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()


def models_are_inspected_here() -> Any:
    """Keep vLLM from a process that imports it all again to look at a class of models, for each the first time.

    It is afraid of CUDA, which no test has. What it finds it keeps in the user's cache, which a new machine lacks.
    """
    return mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda inspect: inspect())


@contextmanager
def processes_are_forked() -> Iterator[None]:
    """Have an engine of several processes that starts in this context fork them, as vLLM does where it may.

    vLLM's CPU platform has all of them spawned, because of OpenMP, and each then imports vLLM again, 8 to 16 s of CPU:
    two for an engine of one rank, five for two replicas. No thread of OpenMP runs before these forks. Engines that
    spawn as users' do: ``make serve`` (``tests/e2e/test_served.py``) and ``make demo``.
    """
    import_vllm()
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    forked = mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_and_fork))
    with models_are_inspected_here(), forked:
        yield
