"""Which tests failed in one run of pytest and passed when they were run again, with the end of each first failure.

Usage: passed_again.py RESULTS CACHE; the first run's ``--junitxml``, of ``junit_family=xunit1`` (it has files), and
pytest's cache directory after the second run with ``--last-failed``. Called by scripts/test.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

LINES = 20
"""Of a failure: what was asserted stands at its end, and what the code under test logged behind that."""


def failures(results: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every failure and error, in the order of the run."""
    for case in ElementTree.parse(results).iter("testcase"):
        found = [one for one in case if one.tag in ("failure", "error")]
        if found:
            # A test of a class: the module's name in "classname" is followed by the class's.
            file = case.attrib["file"]
            inside = case.attrib["classname"].removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
            name = "::".join(filter(None, (file, inside.replace(".", "::"), case.attrib["name"])))
            yield name, "\n".join(one.text or one.attrib["message"] for one in found)


def passed_again(results: Path, cache: Path) -> dict[str, str]:
    """Text of the first failure, by test, of those that do not fail any more."""
    failing = json.loads((cache / "v/cache/lastfailed").read_text())
    return {name: text for name, text in failures(results) if name not in failing}


def main() -> None:
    for name, text in passed_again(Path(sys.argv[1]), Path(sys.argv[2])).items():
        print(f"RACE, failed beside other tests and passed by itself: {name}")
        for line in text.splitlines()[-LINES:]:
            print(f"    | {line}")


if __name__ == "__main__":
    main()
