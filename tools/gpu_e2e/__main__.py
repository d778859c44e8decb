"""``python3 -m tools.gpu_e2e``: see ``runner.py``."""

import sys

try:
    from tools.gpu_e2e.runner import main
except ImportError as exc:
    print(
        f"gpu-e2e: this Python lacks a package of tiered_kv ({exc}). Name one with vLLM and tiered_kv: "
        "make gpu-e2e GPU_PYTHON=/path/to/python3; or install tiered_kv into it. Nothing was run.",
        file=sys.stderr,
    )
    sys.exit(2)

sys.exit(main())
