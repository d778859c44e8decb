"""Lay a CUDA wheel's Python files over the CPU binaries of the vLLM that is installed: a version without a CPU wheel.

What runs then is that version's own Python (engine, scheduler, connector API, model runner) on the installed version's
CPU kernels. Its metadata says version ``...+cpu``, because vLLM asks there whether it was built for CPU.

Usage: python scripts/vllm_python_files.py vllm-*.whl TARGET
"""

import importlib.util
import re
import sys
import zipfile
from pathlib import Path, PurePosixPath

PYTHON_SUFFIXES = {".py", ".json", ".jinja", ".yaml", ".typed", ".txt"}


def unpack(wheel: Path, target: Path) -> None:
    """Put the wheel's Python files into ``target``, and links to the installed vLLM's libraries beside them."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if path.parts[0] == "vllm" and path.suffix in PYTHON_SUFFIXES:
                archive.extract(name, target)
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        (target / metadata).parent.mkdir(parents=True)
        (target / metadata).write_text(re.sub(r"(?m)^(Version: \S+)$", r"\1+cpu", text, count=1))
    for library in sorted(installed_vllm().glob("*.so")):
        (target / "vllm" / library.name).symlink_to(library)


def installed_vllm() -> Path:
    """The directory of the vLLM that this Python imports; it is not imported, which takes seconds.

    Raises:
        SystemExit: There is none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit(f"vllm is not installed for {sys.executable}; run scripts/setup")
    return Path(spec.origin).resolve().parent


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
