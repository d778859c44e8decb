"""Fetch vLLM's own tests of the tiers below its offloading: they are in its source archive on PyPI, in no wheel.

Usage: python scripts/vllm_own_tests.py TARGET
"""

import hashlib
import io
import json
import os
import sys
import tarfile
import urllib.request
from pathlib import Path, PurePosixPath

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
FOLDER = f"vllm-{VERSION}/tests/v1/kv_offload/tiering"
SIMPLE = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 60.0


def fetch(target: Path) -> None:
    """Put the files of ``FOLDER`` into ``target``, unless they are there; 45 MB, once.

    Raises:
        SystemExit: The index has no such archive, or it is not what it was.
    """
    if (target / "complete").exists():
        return
    with urllib.request.urlopen(_url(), timeout=TIMEOUT_S) as answer:
        data = answer.read()
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        raise SystemExit(f"the source archive of vLLM {VERSION} has changed: sha256 {found}, expected {SHA256}")
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if str(path.parent) == FOLDER and path.suffix == ".py" and (file := archive.extractfile(member)):
                (target / path.name).write_bytes(file.read())
    (target / "complete").touch()


def _url() -> str:
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    request = urllib.request.Request(f"{index}/vllm/", headers={"Accept": SIMPLE})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        files = json.load(answer)["files"]
    for one in files:
        if one["hashes"].get("sha256") == SHA256:
            return str(one["url"])
    raise SystemExit(f"{index} has no source archive of vLLM {VERSION} with sha256 {SHA256}")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
