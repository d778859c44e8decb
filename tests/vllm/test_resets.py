"""A reset waits for the server, in vLLM's scheduler thread: no longer than it takes to know that it is dead or hung."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.processes import end_server
from tests.sim.vllm.asking import come_to_rest, parameters, settings
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tiered_kv.vllm.identity import loader_watch
from tiered_kv.vllm.resets import wait_until_durable

pytestmark = pytest.mark.vllm

PROMISED_S = 5.0
"""docs/architecture.md: the call returns when the server has confirmed, or after 5 s."""


class Session:
    """A scheduler's session whose server has been asked to retire the epoch, and a clock that only sleeping moves."""

    def __init__(self, event: Callable[["Session"], None] = lambda session: None, at_s: float = 0.0) -> None:
        self.now_s, self.slept = 70.0, 0
        self.started_s = self.now_s
        self.info: object = object()
        self.is_ready, self.generation = False, 3
        self._event, self._at_s = event, at_s

    @property
    def waited_s(self) -> float:
        return self.now_s - self.started_s

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds < 0.05, "the loop of the scheduler must not sleep through an answer"
        self.now_s += seconds

    def poll(self) -> None:
        if self.waited_s >= self._at_s:
            self._event(self)

    def wait(self) -> float:
        wait_until_durable(self, self.poll, monotonic=lambda: self.now_s, sleep=self.sleep)  # type: ignore[arg-type]
        return self.waited_s


def confirmed(session: Session) -> None:
    session.is_ready = True


def lost(session: Session) -> None:
    session.info, session.generation = None, session.generation + 1


def joined_anew(session: Session) -> None:
    session.generation += 1


def test_a_server_that_never_answers_is_waited_for_no_longer_than_promised(caplog: pytest.LogCaptureFixture) -> None:
    waited_s = Session().wait()
    assert PROMISED_S <= waited_s < PROMISED_S + 0.05
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "the reset holds for this engine but is not durable" in record.getMessage()
    assert f"waited_s={PROMISED_S:.1f}" in record.getMessage()


@pytest.mark.parametrize("at_s", [0.0, 0.5, PROMISED_S - 0.1])
def test_it_ends_with_the_confirmation(caplog: pytest.LogCaptureFixture, at_s: float) -> None:
    assert at_s <= Session(confirmed, at_s).wait() < at_s + 0.05
    assert caplog.records == []


@pytest.mark.parametrize("event", [lost, joined_anew])
def test_it_ends_with_the_session(caplog: pytest.LogCaptureFixture, event: Callable[[Session], None]) -> None:
    assert 1.0 <= Session(event, 1.0).wait() < 1.05
    assert "not durable" in caplog.text


def test_an_engine_without_a_session_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    session.info = None
    assert session.wait() == 0
    assert "not durable" in caplog.text


# -- an engine in the caller's process, which is stepped by `generate` alone -------------------------------------------


class OneProcess:
    """A simulated engine whose scheduler side has found the worker's side in its process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine = SimulatedEngine(Setup(connector=settings(root) | {"tail_tokens": 0}, pool_blocks=64))
        self.hooks, self.worker = self.engine.connector._scheduler, self.engine.workers[0].connector._worker
        self.hooks.bind_block_pool(self.engine.scheduler.kv_cache_manager.block_pool, lambda: self.worker)

    def generate(self, prompt: list[int], **controls: Any) -> None:
        """Step until the answer is complete, and no further."""
        given = parameters(1)
        given.extra_args = {"kv_transfer_params": {f"tiered_kv.{name}": value for name, value in controls.items()}}
        self.engine.add(f"r{len(self.engine.answers)}", prompt, given)
        while self.engine.unfinished():
            self.engine.step()
        assert self.hooks.side.saves.has_work, "the last step has copies"


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[OneProcess]:
    made = OneProcess(tmp_path / "cache")
    yield made
    made.engine.close()
    end_server(made.root)


@pytest.mark.slow
def test_an_adapter_that_was_loaded_before_a_reset_is_reported(
    one_process: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`add_lora` loads it between two steps; it is told once."""
    monkeypatch.setattr(loader_watch, "_adapter_loads", {})
    one_process.worker._adapters_told = 0
    one_process.generate(list(range(40)))
    loader_watch._note_adapter(7, "its files")
    assert one_process.engine.scheduler.reset_prefix_cache()
    one_process.generate(list(range(100, 140)))
    come_to_rest(one_process.engine)
    assert one_process.hooks.side._adapters._held == {7: {0: "its files"}}


@pytest.mark.slow
def test_what_the_last_request_of_an_engine_asks_for_is_told_at_its_end(one_process: OneProcess) -> None:
    one_process.generate(list(range(40)), pin_ttl_s=60)
    one_process.worker.close()
    assert one_process.hooks.side.counters["pins_sent"] == 1
