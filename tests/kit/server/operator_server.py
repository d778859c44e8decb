"""A server that an operator runs (``tiered-kv serve``), and engines that are told to use it and in which role."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def operator_server(root: Path, *arguments: object) -> Iterator[str]:
    """``tiered-kv serve`` on a directory, for the length of a ``with`` block; yields the setting ``server``."""
    with tempfile.TemporaryDirectory(prefix="tkv-") as short:  # a socket's path has at most 107 bytes
        command = [
            "serve",
            f"file://{root}",
            "--host-bytes",
            "256MiB",
            "--disk-bytes",
            "1GiB",
            "--socket",
            f"{short}/s",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "tiered_kv.cli", *command, *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "tiered-kv serve ended; its words are in standard error"
            yield f"unix://{short}/s"
        finally:
            process.terminate()
            process.communicate(timeout=60)


def transfer(extra: Mapping[str, Any], role: str = "kv_both", engine_id: str | None = None) -> Any:
    """vLLM's ``kv_transfer_config`` with our settings."""
    from vllm.config import KVTransferConfig

    named = {} if engine_id is None else {"engine_id": engine_id}
    return KVTransferConfig(
        kv_connector="TieredKVConnector",
        kv_connector_module_path="tiered_kv.vllm",
        kv_role=role,
        kv_connector_extra_config=dict(extra),
        **named,
    )
