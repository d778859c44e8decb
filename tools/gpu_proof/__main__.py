"""``python3 -m tools.gpu_proof``: see ``runner.py``."""

import sys

from tools.gpu_proof.runner import main

sys.exit(main())
