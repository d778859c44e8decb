"""``python3 -m tools.gpu_e2e``: see ``runner.py``."""

import signal
import sys
from collections.abc import Sequence

try:
    from tools.gpu_e2e.runner import main
except ImportError as exc:
    print(
        f"gpu-e2e: this Python lacks a package of tiered_kv ({exc}). Name one with vLLM and tiered_kv: "
        "make gpu-e2e GPU_PYTHON=/path/to/python3; or install tiered_kv into it. Nothing was run.",
        file=sys.stderr,
    )
    sys.exit(2)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run it so that a SIGTERM, as ``timeout`` sends, ends all engines as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
