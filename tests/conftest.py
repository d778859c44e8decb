"""Fixtures every test may ask for. Must stay cheap to import: torch and vLLM come in with the first engine."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.kit.counts import count
from tests.kit.fake_cuda import fake_cuda, fake_cuda_library  # noqa: F401 - fixtures
from tests.kit.s3 import s3  # noqa: F401 - a fixture
from tests.kit.stores.cephfs import cephfs  # noqa: F401 - a fixture
from tests.kit.stores.mooncake import mooncake, mooncake_member  # noqa: F401 - fixtures
from tests.kit.stores.session import stores  # noqa: F401 - a fixture

REPOSITORY = Path(__file__).parent.parent

# A shell that starts the tests in the background has them ignore ctrl-c, and with them all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the machine is shared, and no test here asserts on time. A failure prints what reproduces it.
settings.register_profile("tiered_kv", max_examples=count("EXAMPLES", 30), deadline=None, print_blob=True)
settings.load_profile("tiered_kv")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A Llama model that starts in seconds and whose tokens depend on its KV; built once, kept under build/."""
    from tiered_kv.testing.model import TINY, build_model

    return build_model(REPOSITORY / "build" / "models" / "tiny", shape=TINY)


@pytest.fixture(scope="session")
def new_model() -> Path:
    """The same model with other weights."""
    from tiered_kv.testing.model import TINY, build_model

    return build_model(REPOSITORY / "build" / "models" / "tiny-seed1", seed=1, shape=TINY)


@pytest.fixture(autouse=True)
def package_logger() -> None:
    """The package's logger as Python makes it: a connector or a verb of an earlier test in this process set its own.

    A connector takes vLLM's level and handlers and propagates no more, and ``--log-level`` sets a level:
    then ``caplog`` sees less than it was asked for, in whichever test comes next.
    """
    logger = logging.getLogger("tiered_kv")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def pytest_unconfigure() -> None:
    """The tests are over: what the bindings of vLLM's compiler print while Python ends hides their last line.

    nanobind lists as "leaked" whatever it has no time to free, also where every test passed, and has no switch for it.
    """
    if "triton" in sys.modules:
        atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Import all files of tests with the garbage collector off, and have it leave alone what is there then.

    Hardly anything of modules and tests is garbage. It looked at them again and again while they were imported, a fifth
    of the time of an import of vLLM, and once more each time that all garbage is collected.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs an S3 server, so that ``-m "not s3"`` works without a mark on every test."""
    for item in items:
        if {"s3", "cephfs"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.s3)
    # Several files at a time (see the Makefile): the long ones first, or the last of them runs alone.
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("timeout")}
    items.sort(key=lambda item: item.path not in long)
