"""An engine of the soak as a process of its own, which can be killed: traffic until it is told to end.

Run as a module it reads one line of JSON (``Order``), then one word a line: ``stop`` and ``go`` (asking), ``reset``,
``end``. About once a second it writes one line of JSON with what it counted. :class:`ClientProcess` is the other end.
"""

import json
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tests.kit.module_process import module_command, module_environment
from tests.kit.server.traffic import EngineTraffic, Habits, Prompts
from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError

PROMPTS = Prompts(documents=30, endings=20, fresh=0.2, fresh_count=300, new=0.15)
"""About 2,500 chunks of each model that come again, several times what a disk holds, and beside them ever new ones: in
an hour a server meets many more chunks than it may remember anything of."""

TURN_S = 0.004
REPORT_S = 0.5


class Order(msgspec.Struct):
    """What a process is to do."""

    settings: dict[str, Any]
    engine_id: str
    seed: int
    gap_s: float
    weights: str = "w"


class ClientProcess:
    """The soak's end.

    Threads: one owner; a reader of its own takes the reports.

    Attributes:
        counts: What was last told.
        is_idle: Whether it was stopped and nothing is under way there.
        is_ready: Whether its session is open.
    """

    def __init__(self, order: Order, log: Path) -> None:
        self.order = order
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                module_command(__name__),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=module_environment(),
            )
        self.pid = self._process.pid
        self.counts: Counter[str] = Counter()
        self.is_idle = self.is_ready = False
        self._reader = threading.Thread(target=self._read, name="soak-reader", daemon=True)
        self._reader.start()
        self._say(msgspec.json.encode(order).decode())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                return  # killed in the middle of it
            told = json.loads(line)
            self.counts, self.is_idle, self.is_ready = Counter(told["counts"]), told["is_idle"], told["is_ready"]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def order_to(self, word: str) -> None:
        """``stop``, ``go`` or ``reset``; answered by the reports."""
        self._say(word)
        self.is_idle = False

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._wait()

    def end(self) -> int:
        """End in an orderly way; gives the exit code."""
        self._say("end")
        return self._wait()

    def _wait(self) -> int:
        code = self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"a client of the soak ended by itself. pid={self.pid}") from None


def _join(order: Order, draw: random.Random) -> EngineTraffic:
    """As an engine that is started again until its server comes up: the disk may be full just now."""
    config = Config.from_mapping(order.settings)
    habits = Habits(PROMPTS, gap_s=order.gap_s, hold_s=0.2, weights=order.weights, pin_share=0.02)
    while True:
        try:
            return EngineTraffic(config, order.engine_id, draw, habits)
        except TieredKVError as exc:
            print(f"cannot join: {exc}", file=sys.stderr, flush=True)
            time.sleep(0.2)


def _listen(words: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        words.put(line.strip())
    words.put("end")  # the soak is gone


def _main() -> None:
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(words,), daemon=True).start()
    traffic = _join(order, random.Random(order.seed))
    next_report_s, word = 0.0, ""
    while word != "end":
        word = "" if words.empty() else words.get()
        if word in ("stop", "go"):
            traffic.is_asking = word == "go"
        elif word == "reset":
            traffic.engine.client.reset()
        is_ready = traffic.turn()
        if word or time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + REPORT_S
            told = {
                "counts": traffic.counts,
                "is_idle": traffic.is_idle and not traffic.is_asking,
                "is_ready": is_ready,
            }
            print(json.dumps(told), flush=True)
        time.sleep(TURN_S)
    traffic.close()


if __name__ == "__main__":
    _main()
