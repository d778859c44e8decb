"""Pinning: what it costs, who may do it, what it does with errors, and what a hole in pinned memory does.

Needs a GPU. The memory is as the cache's: a memfd that several processes map and pin.
"""

import os
import resource
import subprocess
import sys
import threading

import torch

from tiered_kv.chunks.cuda import Cuda, CudaError
from tools.gpu_proof.host_memory import GIB, MIB, HostMemory
from tools.gpu_proof.section import Proof

SECOND_PROCESS = """
import sys
import torch
from tiered_kv.chunks.cuda import Cuda
from tools.gpu_proof.host_memory import HostMemory
torch.zeros(1, device="cuda:0")
memory = HostMemory(int(sys.argv[2]), fd=int(sys.argv[1]), is_populated=False)
print(memory.register(Cuda.loaded()))
memory.close()
"""
PROCESS_LIMIT_S = 120
THREADS = 8
HOLE_BYTES = 2 * MIB


def run(proof: Proof) -> None:
    """Measure and check it."""
    if proof.is_dry:
        _check_holes_without_a_gpu(proof)
        return
    cuda = proof.cuda()
    assert cuda is not None
    size = proof.size(GIB)
    kinds = {"4 KiB pages": {}, "huge pages": {"huge": True}, "pages that are not there yet": {"is_populated": False}}
    took = {}
    for name, options in kinds.items():
        memory = HostMemory(size, **options)
        took[name] = memory.register(cuda) * GIB / size
        proof.note(
            memory=name,
            register_s_per_gib=took[name],
            unregister_s_per_gib=memory.unregister() * GIB / size,
            populate_s_per_gib=memory.populate_s * GIB / size,
            is_huge=memory.is_huge,
        )
        memory.close()
    _check_errors(proof, cuda, size)
    _measure_a_second_process(proof, cuda, size)
    _measure_a_low_limit(proof, cuda, size)
    _measure_threads(proof, cuda, size)
    _show_two_registrations(proof, cuda)
    _show_a_hole(proof, cuda)
    proof.headline = f"{took['4 KiB pages']:.3f} s per GiB in 4 KiB pages, {took['huge pages']:.3f} in huge ones"


def _check_errors(proof: Proof, cuda: Cuda, size: int) -> None:
    """A refusal is an error with its number, is not left for torch's next launch, and the range can be pinned again."""
    memory = HostMemory(size)
    memory.register(cuda)
    code = 0
    try:
        cuda.register(memory.address, memory.size)
    except CudaError as exc:
        code = exc.code
    proof.check("memory is refused a second registration at its address (712)", code == 712, code)
    try:
        left = "nothing" if float(torch.ones(4, device=proof.device).sum()) == 4 else "another sum"
    except RuntimeError as exc:
        left = str(exc)
    proof.check("the refusal is not kept for torch's next launch", left == "nothing", left)
    memory.unregister()
    again = "nothing"
    try:
        memory.register(cuda)
    except CudaError as exc:
        again = str(exc)
    proof.check("the same range can be pinned again once it was let go", again == "nothing", again)
    memory.close()


def _measure_a_second_process(proof: Proof, cuda: Cuda, size: int) -> None:
    memory = HostMemory(size)
    memory.register(cuda)
    ran = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, str(memory.fd), str(size)],
        pass_fds=[memory.fd],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )
    if ran.returncode == 0:
        proof.note(memory="the same pages, by another process", register_s_per_gib=float(ran.stdout) * GIB / size)
    proof.check("another process may pin the same pages", ran.returncode == 0, ran.stderr.strip()[-300:])
    memory.close()


def _measure_a_low_limit(proof: Proof, cuda: Cuda, size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = 64 << 10
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (low, hard))
    memory = HostMemory(size)
    try:
        proof.note(memory=f"with RLIMIT_MEMLOCK {low}", register_s_per_gib=memory.register(cuda) * GIB / size)
    except CudaError as exc:
        proof.note(memory=f"with RLIMIT_MEMLOCK {low}", refused=str(exc))
    finally:
        memory.close()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def _measure_threads(proof: Proof, cuda: Cuda, size: int) -> None:
    """Whether several threads pin faster than one."""
    several = [HostMemory(size) for _ in range(THREADS)]
    longest: list[float] = []

    def pin(memory: HostMemory) -> None:
        cuda.set_device(0)
        longest.append(memory.register(cuda))

    threads = [threading.Thread(target=pin, args=(memory,)) for memory in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proof.check("every thread could pin its own", len(longest) == THREADS, len(longest))
    proof.note(memory=f"{THREADS} threads at once", register_s_per_gib=max(longest, default=0.0) * GIB / size / THREADS)
    for memory in several:
        memory.close()


def _show_two_registrations(proof: Proof, cuda: Cuda) -> None:
    """A copy that crosses from one registration into the next: the engine cuts its copies there (sglang#36798)."""
    memory = HostMemory(2 * HOLE_BYTES)
    for at in (0, HOLE_BYTES):
        cuda.register(memory.address + at, HOLE_BYTES)
    memory.array[:] = 7
    seen = torch.zeros(2 * HOLE_BYTES, dtype=torch.uint8, device=proof.device)
    try:
        seen.copy_(torch.from_numpy(memory.array), non_blocking=True)
        proof.synchronize()
        said = "copied" if bool((seen == 7).all()) else "copied wrongly"
    except RuntimeError as exc:
        said = str(exc).splitlines()[0]
    proof.note(memory="a copy across two registrations", said=said)
    for at in (0, HOLE_BYTES):
        cuda.unregister(memory.address + at)
    memory.close()


def _show_a_hole(proof: Proof, cuda: Cuda) -> None:
    """The GPU goes on with the old pages: why pinned memory may not be given back (decision 0016)."""
    memory = HostMemory(4 * HOLE_BYTES)
    memory.register(cuda)
    memory.array[:HOLE_BYTES] = 1
    memory.punch(0, HOLE_BYTES)
    memory.array[:HOLE_BYTES] = 2
    seen = torch.zeros(HOLE_BYTES, dtype=torch.uint8, device=proof.device)
    seen.copy_(torch.from_numpy(memory.array[:HOLE_BYTES]), non_blocking=True)
    proof.synchronize()
    values = sorted(set(seen.cpu().numpy().tolist()))
    proof.note(memory="a hole while pinned, then written with 2", gpu_reads=values)
    memory.close()


def _check_holes_without_a_gpu(proof: Proof) -> None:
    """What the rest of this section builds on: mappings of one memfd share pages, and a hole gives new ones."""
    memory = HostMemory(4 * HOLE_BYTES)
    other = HostMemory(4 * HOLE_BYTES, fd=os.dup(memory.fd), is_populated=False)
    memory.array[:] = 1
    proof.check("two mappings show the same bytes", int(other.array.min()) == 1, int(other.array.min()))
    memory.punch(0, HOLE_BYTES)
    seen = int(other.array[:HOLE_BYTES].max()), int(other.array[HOLE_BYTES:].min())
    proof.check("a hole is zero in both, and nothing beside it", seen == (0, 1), seen)
    proof.headline = "nothing is pinned without a GPU"
    for mapping in (memory, other):
        mapping.close()
