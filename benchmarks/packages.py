"""What a distribution needs in this environment, itself included. Run by ``rivals.py``. Not a benchmark by itself.

    python benchmarks/packages.py DISTRIBUTION

One line of JSON: name to version and bytes of all that its requirements lead to, extras only where one asks for them.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(root: str) -> dict[str, dict[str, object]]:
    """The distributions, by name."""
    found: dict[str, dict[str, object]] = {}
    done: set[tuple[str, str]] = set()
    open_ends = [(root, "")]
    while open_ends:
        end = open_ends.pop()
        name = canonicalize_name(end[0])
        if (name, end[1]) in done:
            continue
        done.add((name, end[1]))
        try:
            known = distribution(end[0])
        except PackageNotFoundError:  # what this platform needs in another way, as vLLM's CPU build does
            continue
        size = sum(int(str(file.size)) for file in known.files or () if file.size)
        found[name] = {"version": known.version, "bytes": size}
        open_ends += _requirements(known, end[1])
    return found


def _requirements(known: Distribution, extra: str) -> Iterator[tuple[str, str]]:
    for line in known.requires or ():
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            for wanted in ("", *one.extras):
                yield one.name, wanted


if __name__ == "__main__":
    print(json.dumps(needed(sys.argv[1])))
