"""Ports of this machine for servers that must be told theirs."""

import socket


def free_port() -> int:
    """One that nobody listens on now; somebody may before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
