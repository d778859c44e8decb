"""``make gpu-proof``: what only a GPU can show of the copies between it and host memory, section by section.

Needs a Python with torch and numpy and this repository, and nothing else: no vLLM, no package of the cache's server.
``runner.py`` runs each section in a process of its own, keeps what came out and says so in a table; ``section.py`` is
what a section gets; ``sections/`` holds them. ``--dry`` runs what does not depend on a GPU on this machine's memory:
it checks the proof itself, and shows nothing about a GPU.
"""
