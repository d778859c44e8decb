"""Names of chunks: from token ids to keys, namespaces and paths.

Pure functions of their input: no I/O, no clock, no torch.

``namespace.py`` says which bytes are comparable at all, ``prefix_keys.py`` names the chunks of one request,
``extras.py`` encodes everything besides tokens that makes a chunk differ, ``naming.py`` turns a name into a path and
back. docs/format.md holds the same as tables. Called by vLLM's scheduler side, the tiers and the CLI.
"""
