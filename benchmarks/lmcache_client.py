"""LMCache's S3 client for ``object_store.py``: the adapter of its server, in a process and environment of its own.

Parent side: :class:`LMCacheClient`. Child side: ``python lmcache_client.py`` by .cache/lmcache's interpreter, which
takes orders as ``serving.py`` does. A task of the adapter moves one blob; as many are in flight as were asked for, and
the next one is submitted when the adapter's event says that one is done. Not a benchmark by itself.
"""

import os
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rival_systems import LMCACHE_PYTHON, QUIET, REPOSITORY
from serving import ServedEngine, serve

DEADLINE_S = 120.0


class LMCacheClient(ServedEngine):
    """The parent's side.

    Threads: one.
    """

    SCRIPT: ClassVar[str] = __file__

    def __init__(self, log: Path, adapter: dict[str, object], model: str, size_bytes: int, count: int) -> None:
        """Start it with so many blobs; ``model`` comes first in the names of its objects."""
        options = {"adapter": adapter, "model": model, "size_bytes": size_bytes, "count": count}
        here = {"PYTHONPATH": str(REPOSITORY), **QUIET}
        super().__init__(log, None, python=LMCACHE_PYTHON, environment=here, **options)

    def timed(self, what: str, in_flight: int, *, is_busy: bool) -> dict[str, float]:
        """Put or get all blobs; of what was got, every byte is compared."""
        return dict(self._call(what, in_flight=in_flight, is_busy=is_busy))


class _Child:
    """The process that has the client."""

    def __init__(self, _: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        import torch
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2Adapter, S3L2AdapterConfig

        self._adapter = S3L2Adapter(S3L2AdapterConfig.from_dict(options["adapter"]))
        self._size = options["size_bytes"]
        content = torch.frombuffer(bytearray(os.urandom(self._size)), dtype=torch.uint8)
        indexes = range(options["count"])
        self._keys = [ObjectKey(index.to_bytes(32, "big"), options["model"], 0) for index in indexes]
        self._slots = [content.clone() for _ in indexes]
        for index, slot in enumerate(self._slots):
            slot[0] = index  # no two are the same
        self._targets = [torch.zeros_like(content) for _ in indexes]

    def put(self, in_flight: int, is_busy: bool) -> dict[str, float]:
        objects = [_memory(slot) for slot in self._slots]
        done: dict[int, bool] = {}

        def is_done(task: int) -> bool:
            done.update(
                {one: result.is_successful() for one, result in self._adapter.pop_completed_store_tasks().items()}
            )
            if task not in done:
                return False
            if not done.pop(task):
                raise RuntimeError("LMCache's client could not put a blob; its log says why")
            return True

        descriptor = self._adapter.get_store_event_fd()
        return self._timed(self._adapter.submit_store_task, objects, is_done, descriptor, in_flight, is_busy)

    def get(self, in_flight: int, is_busy: bool) -> dict[str, float]:
        import torch

        for target in self._targets:
            target.zero_()
        objects = [_memory(target) for target in self._targets]

        def is_done(task: int) -> bool:
            found = self._adapter.query_load_result(task)
            if found is None:
                return False
            if not found.test(0):
                raise RuntimeError("LMCache's client could not get a blob; its log says why")
            return True

        descriptor = self._adapter.get_load_event_fd()
        figures = self._timed(self._adapter.submit_load_task, objects, is_done, descriptor, in_flight, is_busy)
        if not all(map(torch.equal, self._slots, self._targets)):
            raise RuntimeError("other bytes came back")
        return figures

    def close(self) -> None:
        self._adapter.close()

    def _timed(
        self, submit: Any, objects: list[Any], is_done: Any, descriptor: int, in_flight: int, is_busy: bool
    ) -> dict[str, float]:
        from object_store import busy, cpu_seconds

        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        waiting = list(zip(self._keys, objects, strict=True))
        running: set[int] = set()
        with busy(is_busy):
            cpu, start = cpu_seconds(), time.perf_counter()
            while waiting or running:
                while waiting and len(running) < in_flight:
                    key, memory = waiting.pop()
                    running.add(submit([key], [memory]))
                if not poll.poll(1e3 * DEADLINE_S):
                    raise TimeoutError(f"LMCache's client says nothing. {DEADLINE_S=}")
                os.eventfd_read(descriptor)
                running -= {task for task in running if is_done(task)}
            elapsed, used = time.perf_counter() - start, cpu_seconds() - cpu
        gigabytes = self._size * len(objects) / 1e9
        return {"gb_per_s": gigabytes / elapsed, "cpu_s_per_gb": used / gigabytes}


def _memory(tensor: Any) -> Any:
    """What LMCache calls a memory object, over memory of ours."""
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    about = MemoryObjMetadata(tensor.shape, tensor.dtype, tensor.data_ptr(), tensor.numel(), ref_count=1)
    return TensorMemoryObj(tensor, about, None)


if __name__ == "__main__":
    serve(_Child)
