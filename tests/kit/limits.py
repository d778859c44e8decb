"""Limits of the test's own process, for a moment."""

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


def lowest_free(process: int | None = None) -> int:
    """The number of the descriptor that a process, else this one, gets next; limits hold for it, whatever is above."""
    if process is None:
        number = os.dup(0)
        os.close(number)
        return number
    used = {int(name) for name in os.listdir(f"/proc/{process}/fd")}
    return next(number for number in itertools.count() if number not in used)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened, as where others have taken all descriptors; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
