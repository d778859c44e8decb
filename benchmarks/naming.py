"""What naming a model's weights adds to an engine's start: the digest of its files, cold and warm, against reading all.

Run ``python benchmarks/naming.py --gib 16``: prints a table, then the same as JSON on the last line. Writes files of
that size with the tensors of a Llama (embedding and head of 128,256 rows) into ``--directory``, removes them at
its end, and drops only their pages from the page cache for the cold runs.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from tiered_kv.vllm.identity import file_digests as files
from tiered_kv.vllm.identity.model_files import FULL_BYTES

VOCABULARY = 128_256
HIDDEN = 4096
LAYER_ROWS = {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096, "gate": 14336, "up": 14336, "down": 14336}
SHARD_BYTES = 4 << 30
READ_BYTES = 16 << 20


def tensors(total: int) -> list[tuple[str, list[int]]]:
    """Names and shapes in bfloat16 of a model of about ``total`` bytes."""
    found = [("model.embed_tokens.weight", [VOCABULARY, HIDDEN]), ("lm_head.weight", [VOCABULARY, HIDDEN])]
    left = total - 4 * VOCABULARY * HIDDEN
    layer = 0
    while left > 0:
        found += [(f"model.layers.{layer}.{name}.weight", [rows, HIDDEN]) for name, rows in LAYER_ROWS.items()]
        found.append((f"model.layers.{layer}.norm.weight", [HIDDEN]))
        left -= 2 * HIDDEN * (sum(LAYER_ROWS.values()) + 1)
        layer += 1
    return found


def write_model(folder: Path, total: int) -> list[Path]:
    block = os.urandom(READ_BYTES)
    shards: list[dict[str, object]] = [{}]
    sizes = [0]
    for name, shape in tensors(total):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if sizes[-1] + size > SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [sizes[-1], sizes[-1] + size]}
        sizes[-1] += size
    paths = []
    for number, (entries, size) in enumerate(zip(shards, sizes, strict=True)):
        header = json.dumps(entries).encode()
        paths.append(folder / f"model-{number:05}.safetensors")
        with paths[-1].open("wb", buffering=0) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for at in range(0, size, READ_BYTES):
                file.write(block[: min(READ_BYTES, size - at)])
            os.fdatasync(file.fileno())
    return paths


def forget(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(path: Path) -> None:
    """Every byte, hashed at memory's speed."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)


def name(paths: list[Path], full_bytes: int) -> None:
    files.digest_files.cache_clear()
    files.digest_files(files.stamps_of(paths), full_bytes, VOCABULARY)


def seconds(work: Callable[[], object], runs: int, before: Callable[[], object] = lambda: None) -> float:
    """The median time of the work alone."""
    times = []
    for _ in range(runs):
        before()
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return sorted(times)[runs // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.5, help="size of the model")
    parser.add_argument("--directory", help="where its files are put for the time of the run")
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
        paths = write_model(Path(folder), int(chosen.gib * (1 << 30)))
        size = sum(path.stat().st_size for path in paths)

        def everything() -> None:
            with ThreadPoolExecutor(len(paths)) as readers:
                list(readers.map(read_all, paths))

        def named() -> None:
            name(paths, FULL_BYTES)

        def cold() -> None:
            forget(paths)

        result = {
            "bytes": size,
            "named_cold_s": seconds(named, chosen.runs, cold),
            "named_warm_s": seconds(named, chosen.runs),
            "all_cold_s": seconds(everything, 1, cold),
        }
    for label, value in result.items():
        print(f"{label:14} {value:,.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
