"""What the machine is: GPU, driver, link, kernel, memory. Decides nothing; every figure of the proof depends on it."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tools.gpu_proof.section import Proof, gib

SMI_FIELDS = "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,clocks.sm,persistence_mode"


def run(proof: Proof) -> None:
    """Note it."""
    proof.note(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=sys.version.split()[0],
        kernel=os.uname().release,
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    )
    proof.note(
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shmem_huge_pages=_content("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
    )
    proof.headline = f"torch {torch.__version__}, no GPU: a dry run"
    if proof.is_dry:
        return
    properties = torch.cuda.get_device_properties(proof.device)
    cuda = proof.cuda()
    assert cuda is not None
    proof.note(
        gpu=properties.name,
        multiprocessors=properties.multi_processor_count,
        gpu_memory_gib=gib(properties.total_memory),
        has_batched_copies=cuda.has_batch,
    )
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()
        proof.note(nvidia_smi=said[0] if said else "nothing", fields=SMI_FIELDS)
    proof.headline = f"{properties.name}, torch {torch.__version__}, batched copies: {cuda.has_batch}"


def _content(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as exc:
        return f"unreadable ({exc.strerror})"
