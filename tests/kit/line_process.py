"""A process that a test talks to by lines of JSON: one message a line on its standard input, one answer a line back."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class LineProcess:
    """The test's end: starts the process, says its settings and waits until it is ready.

    The process reads settings from the first line and answers ``{"ready": true}``; it ends when its input does. What it
    writes to standard error is appended to ``log``.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], settings: dict[str, Any]
    ) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        try:
            self._say(settings)
            assert self._hear() == {"ready": True}
        except BaseException:  # a timeout of the test, too: nobody has this object to close
            self._process.terminate()
            raise

    def close(self) -> None:
        """End the process and wait until it is gone. Idempotent."""
        if self._log.closed:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _say(self, message: dict[str, Any] | list[str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended; see {self._log.name}"
        return json.loads(line)
