"""``make demo``: a real vLLM answers a long prompt cold, then from host memory, from disk and from a bucket.

Starts one process after the other, each with its own engine (see ``engine_process.py``), checks what was promised,
prints a table and writes ``build/demo.json``. The bucket is on a real S3 server (see ``scripts/s3_service.py``); where
none is to be had, its phase is skipped with the reason, or with ``CI=true`` the demo fails. Exit codes: 0 all promises
held, 1 one was broken or a process failed, 130 interrupted.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import scenario
from asking import wait_for_server_end
from report import OBJECT, Phase, broken_promises, machine, table, write_json
from rich.console import Console
from rich.markup import escape

from tiered_kv.config import Config

sys.path.append(str(scenario.REPOSITORY / "scripts"))
from s3_service import BadServerError, Bucket, NoServerError, open_bucket  # shared with tests and benchmarks

PROCESS_DEADLINE_S = 600.0
HEARTBEAT_S = 10.0
LOG_TAIL_LINES = 30
SERVER_TAIL_LINES = 12

PREFIX = f"demo-{os.getpid()}"
"""Of everything that this run stores in the bucket."""

STARTED_S = time.monotonic()
console = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """The demo cannot go on; the message is for the user."""


def main() -> int:
    try:
        _prepare()
        with _bucket() as (bucket, skipped):
            phases, details = _measure(bucket)
    except DemoFailed as exc:
        console.print(f"[bold red]demo failed:[/] {escape(str(exc))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    write_json(scenario.RESULT, phases, {"skipped": skipped, **details})
    console.print()
    console.print(table(phases, skipped))
    if phases[0].kv_bytes_equal is None:
        console.print("cold: KV bytes differ from plain vLLM's (two runs are not bit-equal here), so nothing is said.")
    for name, reason in skipped.items():
        console.print(f"[yellow]{name} was skipped:[/] {escape(reason)}")
    _show_files()
    broken = broken_promises(phases, scenario.SHARED_TOKENS, skipped)
    if broken:
        _explain(details["counters"])
    for line in broken:
        console.print(f"[bold red]promise broken:[/] {escape(line)}")
    if not broken:
        console.print(f"[green]all promises held[/] ({time.monotonic() - STARTED_S:.0f} s)")
    return 1 if broken else 0


@contextmanager
def _bucket() -> Iterator[tuple[Bucket | None, dict[str, str]]]:
    """A bucket, or None and the phase that is skipped with the reason.

    Raises:
        DemoFailed: The server that was named cannot be used; or there is none, with ``CI=true``.
    """
    bucket, skipped = None, {}
    with ExitStack() as at_end:
        try:
            bucket = at_end.enter_context(open_bucket("demo", PREFIX, say=_say))
            _say(f"the bucket is on {bucket.server}")
        except BadServerError as exc:
            raise DemoFailed(str(exc)) from exc
        except NoServerError as exc:
            if os.environ.get("CI") == "true":
                raise DemoFailed(f"CI=true, and there is no S3 server to show the bucket with: {exc}") from exc
            skipped[OBJECT] = f"no S3 server: {exc}"
            _say(f"{OBJECT} will be skipped: {skipped[OBJECT]}")
        yield bucket, skipped


def _measure(bucket: Bucket | None) -> tuple[list[Phase], dict[str, Any]]:
    uri = None if bucket is None else bucket.uri(PREFIX)
    environment = dict(os.environ) if bucket is None else bucket.credentials.environment(os.environ)
    environment |= scenario.ENVIRONMENT | ({scenario.URI_VARIABLE: uri} if uri else {})
    reference = _run(scenario.PLAIN, environment)
    results, ends_s = [], {}
    for role in (scenario.FIRST, scenario.SECOND, *([scenario.THIRD] if bucket else [])):
        results.append(_run(role, environment))
        if role == scenario.FIRST:
            _say("restart: waiting for the first cache server to write what it holds and end")
        ends_s[role] = _wait_for_server_end(scenario.cache(role))
    details = {
        "shared_prefix_tokens": scenario.SHARED_TOKENS,
        "machine": machine(),
        "settings": {
            "model": reference["model"],
            "engine": scenario.ENGINE,
            "connector": _shown_connector(uri),
            "environment": scenario.ENVIRONMENT,
            "block_tokens": reference["block_tokens"],
        },
        "s3_server": None if bucket is None else bucket.server,
        "plain_vllm_ttft_s": [round(answer["ttft_s"], 4) for answer in reference["answers"]],
        "margins": [answer["margin"] for answer in reference["answers"]],
        "server_end_s": round(ends_s[scenario.FIRST], 3),
        "counters": {name: counted for result in results for name, counted in result["counters"].items()},
        "total_s": round(time.monotonic() - STARTED_S, 1),
    }
    return [Phase(**phase) for result in results for phase in result["phases"]], details


def _shown_connector(uri: str | None) -> dict[str, Any]:
    """The first engine's settings, paths relative to the repository."""
    settings = scenario.connector(scenario.FIRST, uri)
    place = _shown(scenario.CACHE)
    if uri is None:
        return settings | {"storage_uri": f"file:///.../{place}"}
    return settings | {"storage_uri": Config.from_mapping(settings).describe()["storage_uri"], "disk_path": place}


def _prepare() -> None:
    """Start with empty caches and no old results; a server of an interrupted run may still be ending."""
    for cache in (scenario.CACHE, scenario.OTHER_CACHE):
        if cache.exists():
            _wait_for_server_end(cache)
            shutil.rmtree(cache)
    shutil.rmtree(scenario.FILES, ignore_errors=True)
    scenario.RESULT.unlink(missing_ok=True)
    scenario.FILES.mkdir(parents=True)


def _run(role: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run one engine process to its end, showing its progress; what it wrote."""
    log = scenario.FILES / f"{role}.log"
    reader, writer = os.pipe()
    with open(log, "wb") as output, open(reader, "rb", buffering=0) as progress:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_process.py")), role, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=scenario.REPOSITORY,
            pass_fds=(writer,),
        )
        os.close(writer)
        try:
            _follow(role, progress.fileno())
            status = process.wait(PROCESS_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise _failure(role, log, f"did not end within {PROCESS_DEADLINE_S:g} s") from None
        finally:
            process.kill()
            process.wait()
    if status != 0:
        raise _failure(role, log, f"ended with status {status}")
    result: dict[str, Any] = json.loads((scenario.FILES / f"{role}.json").read_text())
    return result


def _follow(role: str, channel: int) -> None:
    """Print the process's lines until it closes the channel; between them, that it is still at it."""
    end_s = time.monotonic() + PROCESS_DEADLINE_S
    pending = b""
    doing, since_s = "starting", time.monotonic()
    while time.monotonic() < end_s:
        if not select.select([channel], [], [], HEARTBEAT_S)[0]:
            _say(f"{scenario.ROLES[role]}:   still at it, {time.monotonic() - since_s:.0f} s: {doing}")
            continue
        received = os.read(channel, 65_536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            doing, since_s = line.decode(errors="replace"), time.monotonic()
            _say(f"{scenario.ROLES[role]}: {doing}")
    raise subprocess.TimeoutExpired(role, PROCESS_DEADLINE_S)


def _wait_for_server_end(cache: Path) -> float:
    """Wait until no server owns the directory: all that was acknowledged is written; the seconds it took.

    Raises:
        DemoFailed: A server still owns it after a minute.
    """
    started_s = time.monotonic()
    if why := wait_for_server_end(cache):
        raise DemoFailed(why)
    return time.monotonic() - started_s


def _failure(role: str, log: Path, what: str) -> DemoFailed:
    _show_tail(log, LOG_TAIL_LINES)
    return DemoFailed(f"{scenario.ROLES[role]} {what}; the whole log is in {_shown(log)}")


def _explain(counters: dict[str, dict[str, float]]) -> None:
    """What a person needs to find out why a promise was broken."""
    console.print("\nthe ends of the cache servers' logs, and what the connector counted up to each phase:")
    for cache in (scenario.CACHE, scenario.OTHER_CACHE):
        if (cache / "server.log").exists():
            _show_tail(cache / "server.log", SERVER_TAIL_LINES)
    for phase, counted in counters.items():
        console.print(f"  {phase}: {counted}", markup=False)


def _show_tail(log: Path, lines: int) -> None:
    try:
        text = log.read_text(errors="replace")
    except OSError as exc:
        text = f"the log cannot be read. {exc}"
    for line in text.splitlines()[-lines:]:
        console.print(f"  | {line}", markup=False, style="dim")


def _show_files() -> None:
    console.print(f"results   {_shown(scenario.RESULT)}")
    servers = f"{_shown(scenario.CACHE)}*/server.log"
    console.print(f"logs      {_shown(scenario.FILES)}/*.log, the cache servers' in {servers}")
    console.print(f"the cache {_shown(scenario.CACHE)}, look at it:")
    command = Path(sys.executable).with_name("tiered-kv")
    console.print(f'          {_shown(command)} stat "file://$PWD/{_shown(scenario.CACHE)}"')


def _say(text: str) -> None:
    console.print(f"{time.monotonic() - STARTED_S:6.1f} s  {text}", markup=False)


def _shown(path: Path) -> str:
    """The path as a user in the repository would type it."""
    return os.path.relpath(path, scenario.REPOSITORY)


if __name__ == "__main__":
    sys.exit(main())
