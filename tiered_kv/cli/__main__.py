"""`python -m tiered_kv.cli`: the same as `tiered-kv`."""

from tiered_kv.cli.main import main

main()
