"""What an operator does to stored chunks: list, check, remove, move, explain. No printing and no command line in here.

Acts on the one tier a URI names (rule 7), whether or not a server runs; what a running server must know of goes
through it. Called by ``cli/``.
"""
