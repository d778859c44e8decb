"""`make serve`: vLLM's OpenAI-compatible server on CPU behind the cache, with a small model that is built here.

    demo/serve.py [--cache DIRECTORY] [--settings JSON] [arguments of vLLM's server ...]

Prints the command it runs and becomes it. It is the README's `vllm serve` line, by its module, because the CPU wheel
goes by another name and breaks that script; and with what a small CPU needs. The model speaks words `t3` to `t1023`.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "build" / "models" / "served"
CACHE = REPOSITORY / "build" / "serve-cache"

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # "auto" would pin every process that is started later to single cores, too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Under enforce_eager only a function of three lines would be compiled, and a C++ compiler would be needed.
    "TORCH_COMPILE_DISABLE": "1",
    # Routes that empty vLLM's own prefix cache, so that a hit can be seen to come from tiered_kv. On 127.0.0.1 only.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

ARGUMENTS = (
    *("--served-model-name", "tiny"),
    *("--chat-template", str(REPOSITORY / "demo" / "chat.jinja")),
    "--enable-prompt-tokens-details",
    *("--dtype", "bfloat16", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "4096", "--max-num-seqs", "8"),
)


def command(cache: Path, settings: dict[str, object], more: list[str]) -> list[str]:
    """What to run."""
    transfer = {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "storage_uri": cache.resolve().as_uri(),
            "host_bytes": "256MiB",
            "disk_bytes": "1GiB",
        }
        | settings,
    }
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    return [*start, "--kv-transfer-config", json.dumps(transfer), *ARGUMENTS, *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of the disk tier")
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings of the connector, as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    known, more = parser.parse_known_args()
    from tiered_kv.testing.model import TINY, build_model  # torch, which --help need not wait for

    build_model(MODEL, shape=TINY)
    words = command(known.cache, known.settings, ["--host", known.host, "--port", str(known.port), *more])
    print(shlex.join([*(f"{name}={value}" for name, value in ENVIRONMENT.items()), *words]), flush=True)
    os.execve(words[0], words, os.environ | ENVIRONMENT)


if __name__ == "__main__":
    main()
