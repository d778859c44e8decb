"""What the link gives: large copies of pinned and pageable memory, one way and both ways, and by size of a copy."""

from collections.abc import Callable
from typing import Any

import torch

from tools.gpu_proof.host_memory import GIB, MIB, HostMemory
from tools.gpu_proof.section import Proof, gigabytes_per_s

PIECES = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 32 * MIB)
PIECES_MAX = 2048
STREAMS = 32
"""As many as torch's pool has: each engine takes the next ones."""


def run(proof: Proof) -> None:
    """Measure it."""
    size = proof.size(GIB)
    device = torch.empty(size, dtype=torch.uint8, device=proof.device)
    other = torch.empty(size, dtype=torch.uint8, device=proof.device)
    best = {"load": 0.0, "save": 0.0}
    for name, memory in _memories(proof, size).items():
        host = torch.from_numpy(memory.array)
        load = gigabytes_per_s(size, proof.median_s(_copy(device, host)))
        save = gigabytes_per_s(size, proof.median_s(_copy(host, device)))
        both = gigabytes_per_s(size, proof.median_s(_both(proof, host, device, other, size // 2)))
        proof.note(memory=name, load=load, save=save, both=both)
        if name != "pageable":
            best = {"load": max(best["load"], load), "save": max(best["save"], save)}
        if name == "pinned":
            _by_size(proof, host, device, size)
            _by_stream(proof, host, device, size // 8)
        del host
        memory.close()
    proof.headline = "this machine's memory, and no link"
    if not proof.is_dry:
        proof.headline = f"pinned: {best['load']:.1f} GB/s to the GPU, {best['save']:.1f} back"


def ceiling(proof: Proof, size: int) -> dict[str, float]:
    """GB/s of one large copy of so many pinned bytes each way."""
    memory = HostMemory(-(-size // MIB) * MIB)
    if cuda := proof.cuda():
        memory.register(cuda)
    host = torch.from_numpy(memory.array)
    device = torch.zeros(memory.size, dtype=torch.uint8, device=proof.device)
    load = gigabytes_per_s(memory.size, proof.median_s(_copy(device, host), 3))
    save = gigabytes_per_s(memory.size, proof.median_s(_copy(host, device), 3))
    del host
    memory.close()
    return {"load": load, "save": save}


def _memories(proof: Proof, size: int) -> dict[str, HostMemory]:
    cuda = proof.cuda()
    if cuda is None:
        return {"pageable": HostMemory(size)}
    found = {
        "pageable": HostMemory(size),
        "pinned": HostMemory(size),
        "pinned, huge pages": HostMemory(size, huge=True),
    }
    for name, memory in found.items():
        if name != "pageable":
            memory.register(cuda)
    return found


def _copy(to: Any, of: Any) -> Callable[[], Any]:
    return lambda: to.copy_(of, non_blocking=True)


def _both(proof: Proof, host: Any, device: Any, other: Any, half: int) -> Callable[[], None]:
    kit = proof.engine_device(has_batch=False)
    up, down = kit.stream(for_kernels=False), kit.stream(for_kernels=False)

    def copy() -> None:
        with kit.on(up):
            device[:half].copy_(host[:half], non_blocking=True)
        with kit.on(down):
            host[half:].copy_(other[half:], non_blocking=True)

    return copy


def _by_size(proof: Proof, host: Any, device: Any, size: int) -> None:
    for piece in PIECES:
        count = min(size // piece, PIECES_MAX)
        if not count:
            continue
        row = {}
        for side, (to, of) in {"load": (device, host), "save": (host, device)}.items():

            def copy(to: Any = to, of: Any = of, piece: int = piece, count: int = count) -> None:
                for at in range(0, count * piece, piece):
                    to[at : at + piece].copy_(of[at : at + piece], non_blocking=True)

            row[side] = gigabytes_per_s(count * piece, proof.median_s(copy, 3))
        proof.note(copies_of_kib=piece >> 10, count=count, **row)


def _by_stream(proof: Proof, host: Any, device: Any, size: int) -> None:
    """Whether all streams get the same of the link."""
    kit = proof.engine_device(has_batch=False)
    streams = [kit.stream(for_kernels=False) for _ in range(STREAMS)]
    for side, (to, of) in {"load": (device, host), "save": (host, device)}.items():
        rates = []
        for stream in streams:

            def copy(to: Any = to, of: Any = of, stream: Any = stream) -> None:
                with kit.on(stream):
                    to[:size].copy_(of[:size], non_blocking=True)

            rates.append(round(gigabytes_per_s(size, proof.median_s(copy, 3)), 1))
        proof.note(streams=STREAMS, side=side, least=min(rates), most=max(rates), each=rates)
