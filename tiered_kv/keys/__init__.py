"""From token ids to the names of chunks: pure functions of their input, no I/O, no clock, no torch.

``namespace.py`` says which bytes are comparable at all, ``rolling.py`` names the chunks of one request, ``extras.py``
encodes what besides tokens makes a chunk differ, ``naming.py`` turns a name into a path and back. docs/format.md holds
the same as tables. Called by vLLM's scheduler side, the tiers and the CLI.
"""
