"""The cache server: the engine behind a Unix socket, one per node, and the client that talks to it."""
