"""Print the packages that a vLLM wheel and tiered_kv need on a GPU machine and that it lacks, NAME==VERSION each.

The rule: what the wheel's metadata and our pyproject.toml ask for, and what those ask for in turn, without what the
machine has and without LEFT_OUT. A package that the machine has is taken as it is, also where another version is asked
for: such ones are named on standard error, to be looked at before a machine is lent. Nothing is installed; pip finds
the newest versions that all requirements take.

Usage: python scripts/pack_vllm_packages.py WHEEL PIPLIST
       python scripts/pack_vllm_packages.py --target
  PIPLIST  what `python3 -m pip list` printed on the machine, lines apart or joined by ";"
With --target: what pip is told about the machine, a word per line.
"""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from vllm_requirements import declared  # beside this script

LEFT_OUT: Final = {
    "torch": "the machine's, with its triton: vLLM's operators are built for torch's stable interface of 2.11",
    "torchaudio": "of the machine's torch, if any; for models that hear",
    "torchvision": "of the machine's torch, if any; for models that see",
    "torchcodec": "decodes video; imported where a video is",
    "pynvvideocodec": "decodes video; imported where a video is",
    "opencv-python-headless": "for images; 60 MB; imported where an image is",
    "flashinfer-python": "gigabytes with what it compiles; vLLM looks for it, and tools/gpu_e2e turns its sampler off",
    "tilelang": "kernels of sparse attention (DeepSeek V3.2), 100 MB; vLLM looks for it",
    "nvidia-cudnn-frontend": "attention of vision encoders by FlashInfer",
    "nvidia-cutlass-dsl": "kernels for Blackwell, 300 MB with its libraries; FlashAttention 3 of a Hopper is compiled",
    "quack-kernels": "kernels for Blackwell, in the CUTLASS DSL",
    "tokenspeed-mla": "multi-head latent attention on Blackwell, in the CUTLASS DSL",
    "humming-kernels": "quantized matrix products, compiled when used; vLLM looks for it",
    "mistral-common": "Mistral's own tokenizer and images, 15 MB with pycountry; vLLM imports it for such models",
    "anthropic": "an HTTP server of Anthropic's protocol; these engines run in the process",
    "fastapi-cli": "starts HTTP servers; asked for by fastapi[standard]",
    "supervisor": "restarts HTTP servers in a container",
    "cryptography": "signed tokens of MCP servers; 5 MB",
    "fastsafetensors": "another way to load weights, if load_format asks for it",
    "instanttensor": "another way to load weights, if load_format asks for it",
    "aiobotocore": "buckets alone",
    "botocore": "buckets alone",
    "s3fs": "buckets alone",
}
"""Why a dense bf16 Llama on one Hopper, text alone and loaded from safetensors, does without."""

PYTHON: Final = "3.12"
GLIBC_MINOR: Final = 39
ENVIRONMENT: Final = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
TARGET: Final = (
    *("--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"),
    *(word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)),
    *(
        word
        for platform in ("any", "manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64")
        for word in ("--platform", platform)
    ),
    *(word for minor in range(5, GLIBC_MINOR + 1) for word in ("--platform", f"manylinux_2_{minor}_x86_64")),
)
"""pip's words for the machine; ``pack-vllm`` gives them to ``pip download``."""


def machine_packages(text: str) -> dict[str, str]:
    """Versions by canonical name.

    Raises:
        ValueError: No line of ``pip list`` is in it.
    """
    lines = [line.split() for line in re.split(r"[;\n]", text)]
    versions: dict[str, str] = {
        canonicalize_name(words[0]): words[1] for words in lines if len(words) >= 2 and words[1][0].isdigit()
    }
    if not versions:
        raise ValueError("lines of `pip list` are expected, a name and a version each")
    return versions


def roots(wheel: Path, pyproject: Path) -> list[tuple[str, Requirement]]:
    """What the wheel and we ask for, each with who asks."""
    ours = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    theirs = declared(wheel)
    return [("vllm", one) for one in theirs] + [("tiered_kv", Requirement(text)) for text in ours]


class Packages:
    """What is to be packed; grows until nothing more is asked for."""

    def __init__(self, machine: dict[str, str]) -> None:
        self._machine = machine
        self._requirements: dict[str, None] = {}
        self.differences: dict[str, None] = {}
        self.left_out: set[str] = set()

    def ask(self, by: str, requirement: Requirement, extras: Iterable[str] = ()) -> None:
        """Note a requirement, of a package with these extras, if it is for the machine."""
        marker = requirement.marker
        if marker and not any(marker.evaluate(ENVIRONMENT | {"extra": extra}) for extra in ("", *extras)):
            return
        name = canonicalize_name(requirement.name)
        version = self._machine.get(name)
        if version is not None:
            if not requirement.specifier.contains(version, prereleases=True):
                self.differences[f"{name}: {by} asks for {requirement.specifier}, the machine has {version}"] = None
        elif name in LEFT_OUT:
            self.left_out.add(name)
        else:
            bare = Requirement(str(requirement))
            bare.marker = None
            self._requirements[str(bare)] = None

    def resolve(self) -> list[str]:
        """``name==version`` of each, sorted.

        Raises:
            subprocess.CalledProcessError: pip finds no versions that all requirements take; it has said which.
        """
        while True:
            asked = len(self._requirements)
            found = _metadata(list(self._requirements))
            for item in found:
                for text in item["metadata"].get("requires_dist", []):
                    self.ask(item["metadata"]["name"], Requirement(text), item.get("requested_extras", []))
            if len(self._requirements) == asked:
                return sorted(f"{item['metadata']['name']}=={item['metadata']['version']}" for item in found)


def _metadata(requirements: list[str]) -> list[dict[str, Any]]:
    """What pip would install for these alone."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--ignore-installed", "--target", "unused", "--report", "-", *TARGET, *requirements]
    installed: list[dict[str, Any]] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)[
        "install"
    ]
    return installed


def main(arguments: list[str]) -> int:
    """Print the packages; what is to be known about them goes to standard error."""
    if arguments == ["--target"]:
        print("\n".join(TARGET))
        return 0
    if len(arguments) != 2:
        print("usage: python scripts/pack_vllm_packages.py WHEEL PIPLIST", file=sys.stderr)
        return 2
    wheel, listed = map(Path, arguments)
    try:
        packages = Packages(machine_packages(listed.read_text()))
        for by, requirement in roots(wheel, Path(__file__).parents[1] / "pyproject.toml"):
            packages.ask(by, requirement)
        resolved = packages.resolve()
    except (OSError, ValueError, zipfile.BadZipFile) as exc:
        print(f"pack-vllm: {exc}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:
        print("pack-vllm: pip finds no versions that all requirements take (above)", file=sys.stderr)
        return 1
    print("\n".join(resolved))
    for name in sorted(packages.left_out):
        print(f"left out, the machine has none: {name}: {LEFT_OUT[name]}", file=sys.stderr)
    for line in sorted(packages.differences):
        print(f"the machine's is taken: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
