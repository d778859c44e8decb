"""What another thread may do while the model captures a CUDA graph; copies under the graph's replays.

Needs a GPU. vLLM captures in the mode that any thread's forbidden call breaks, so copy threads relax it for themselves.
"""

import threading
import time
from collections.abc import Callable

import torch

from tools.gpu_proof.host_memory import GIB, MIB, HostMemory
from tools.gpu_proof.section import Proof
from tools.gpu_proof.shapes import REAL
from tools.gpu_proof.world import world

CAPTURES, PRODUCTS = 20, 200


def run(proof: Proof) -> None:
    """Try them."""
    if proof.is_dry:
        proof.headline = "nothing is captured without a GPU"
        return
    cuda = proof.cuda()
    assert cuda is not None
    memory = HostMemory(64 * MIB)
    with world(proof, REAL[0], pool_bytes=2 * GIB, chunks=16) as made:
        rank = made.engine("staged")
        mark = rank.mark()
        made.save(rank).wait()  # without copying(): this thread's own calls are not to be relaxed

        def pin() -> None:
            memory.register(cuda)
            memory.unregister()

        def save() -> None:
            made.save(rank, mark).wait()

        def relaxed(action: Callable[[], None]) -> Callable[[], None]:
            def run_relaxed() -> None:
                with rank.copying():
                    action()

            return run_relaxed

        allowed = {
            "nothing": lambda: time.sleep(1e-3),
            "saves, as the copy threads make them": relaxed(save),
            "pinning, as the copy threads do it": relaxed(pin),
        }
        for name, action in allowed.items():
            model, there = _capture_beside(proof, action)
            proof.note(other_thread=name, model=model, error_there=there)
            proof.check(f"a graph is captured and right beside: {name}", model == "captured" and not there, model)
        # Last: it may leave the context unusable, and is only noted.
        model, there = _capture_beside(proof, pin)
        proof.note(other_thread="pinning in a thread that relaxes nothing", model=model, error_there=there)
    memory.close()
    proof.headline = "captures beside copies and pinning" + ("" if proof.verdict == "right" else ": broken")


def _capture_beside(proof: Proof, action: Callable[[], None]) -> tuple[str, str]:
    """What became of the captures, and the other thread's first error."""
    stop, errors = threading.Event(), []
    start = torch.eye(512, device=proof.device)
    _warm_up(start)

    def other() -> None:
        try:
            torch.cuda.set_device(proof.device)
            while not stop.is_set():
                action()
        except Exception as exc:  # noqa: BLE001 - whatever it is is what is asked for
            errors.append(f"{type(exc).__name__}: {exc}"[:200])

    thread = threading.Thread(target=other)
    thread.start()
    result, product = "captured", start
    try:
        for _ in range(CAPTURES):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                product = start
                for _ in range(PRODUCTS):
                    product = product @ start
            graph.replay()
        torch.cuda.synchronize(proof.device)
        if not torch.equal(product, start):
            result = "captured, and wrong"
    except RuntimeError as exc:
        result = f"{type(exc).__name__}: {exc}"[:300]
    stop.set()
    thread.join()
    return result, errors[0] if errors else ""


def _warm_up(matrix: torch.Tensor) -> None:
    """Multiply once beside the stream that captures: cuBLAS takes its memory then, which no capture allows."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        matrix @ matrix
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
