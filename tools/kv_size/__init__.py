"""What a model's KV takes. `python -m tools.kv_size` is its command line; docs/sizing.md has figures."""
