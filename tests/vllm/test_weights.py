"""Weights identity on real files that vLLM's loaders read: equal for equal weights wherever they lie, else not."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.identity import file_digests as files
from tiered_kv.vllm.identity import loader_watch as loads
from tiered_kv.vllm.identity import model_files as weights
from tiered_kv.vllm.identity.model_files import weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = 4096


@pytest.fixture(autouse=True)
def watched():
    loads.watch_loaders()


def config(model, load_format="auto", **model_fields):
    """The parts of VllmConfig that are read."""
    fields = {"model": str(model), "revision": None, "seed": 0, "hf_text_config": SimpleNamespace(vocab_size=ROWS)}
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields | model_fields),
        load_config=LoadConfig(load_format=load_format),
        parallel_config=SimpleNamespace(enable_elastic_ep=False),
    )


def loaded(model, load_format="auto", **model_fields):
    """The same once vLLM's loader has looked for the files to read."""
    vllm_config = config(model, load_format, **model_fields)
    loader = get_model_loader(vllm_config.load_config)
    loader._prepare_weights(str(model), None, None, True, None)
    return vllm_config


def named(model, load_format="auto"):
    return weights_identity(loaded(model, load_format), None)


def write_model(folder, seed=0, shards=2):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for shard in range(shards):
        tensors = {f"{shard}.{i}": rng.standard_normal((64, 50), dtype=np.float32) for i in range(6)}
        save_file(tensors, folder / f"model-{shard}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def link_model(folder, seed=0):
    """As the hub's cache lays a commit out: links to blobs beside the snapshots."""
    repository = next(parent for parent in folder.parents if parent.name.startswith("models--"))
    source = write_model(repository.parent / "sources" / folder.name, seed)
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        blob = repository / "blobs" / f"{folder.name}-{file.name}"
        file.replace(blob)
        (folder / file.name).symlink_to(os.path.relpath(blob, folder))
    return folder


def sampled(folder):
    return files.digest_files(files.stamps_of([*folder.glob("*.safetensors"), *folder.glob("*.bin")]), 0, ROWS)


def full(folder):
    return files.digest_files(files.stamps_of(folder.glob("*.safetensors")), weights.FULL_BYTES, ROWS)


def test_model_id_is_the_users_word_and_nothing_is_read(tmp_path):
    assert weights_identity(config(tmp_path / "nothing"), "mine") == "user:mine"


def test_dummy_weights_are_named_by_their_seed(tmp_path):
    assert weights_identity(config(tmp_path, load_format="dummy", seed=7), None) == "dummy:7"


def test_dummies_that_are_filled_by_other_engines_are_not_named(tmp_path):
    vllm_config = config(tmp_path, load_format="dummy")
    vllm_config.parallel_config.enable_elastic_ep = True
    with pytest.raises(ConfigError, match="load_format=dummy"):
        weights_identity(vllm_config, None)


def test_snapshot_of_the_hub_cache_has_one_name_on_every_machine_while_its_files_are_the_same(tmp_path):
    folder = link_model(tmp_path / "models--a--b" / "snapshots" / COMMIT)
    other = link_model(tmp_path / "other" / "models--a--b" / "snapshots" / COMMIT)
    link = tmp_path / "current"
    link.symlink_to(folder)
    assert named(folder) == named(link) == named(other)
    save_file({"0.0": np.zeros((64, 50), dtype=np.float32)}, tmp_path / "trained.safetensors")
    # Through the link, as whoever saves into the cache's snapshot may write: the commit is the same.
    (folder / "model-0.safetensors").write_bytes((tmp_path / "trained.safetensors").read_bytes())
    assert named(folder) == named(link) != named(other)


def test_checkpoints_and_formats_below_one_snapshot_have_names_of_their_own(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    first, second = (link_model(snapshot / f"checkpoint-{seed}", seed) for seed in (1, 2))
    assert named(first) != named(second)
    before = named(second, "safetensors")
    (snapshot.parent.parent / "blobs" / "consolidated").write_bytes((second / "model-0.safetensors").read_bytes())
    (second / "consolidated.safetensors").symlink_to("../../../blobs/consolidated")
    assert len({before, named(second, "mistral"), named(second, "safetensors")}) == 3


def test_directory_that_is_only_called_like_a_snapshot_is_digested(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    names = [named(write_model(snapshot / f"step-{seed}", seed)) for seed in (1, 2)]
    names.append(named(write_model(tmp_path / "runs" / "snapshots" / COMMIT / "step-2", seed=2)))
    assert names[0] != names[1] == names[2]
    assert all(name.startswith("sha256v2:") for name in names)


def test_copy_in_another_directory_has_the_same_identity(tmp_path):
    folder = write_model(tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b", copy_function=shutil.copyfile)
    assert named(folder) == named(tmp_path / "b")
    assert sampled(folder) == sampled(tmp_path / "b")


@pytest.mark.parametrize("digest", [sampled, full])
def test_other_weights_of_the_same_shapes_have_another_identity(tmp_path, digest):
    assert digest(write_model(tmp_path / "a", seed=1)) != digest(write_model(tmp_path / "b", seed=2))


@pytest.mark.parametrize("digest", [sampled, full])
def test_other_names_and_sizes_are_another_identity(tmp_path, digest):
    first = digest(write_model(tmp_path / "a"))
    renamed = write_model(tmp_path / "b")
    (renamed / "model-1.safetensors").rename(renamed / "model-2.safetensors")
    fewer = write_model(tmp_path / "c", shards=1)
    assert len({first, digest(renamed), digest(fewer)}) == 3


def test_sampling_sees_a_change_of_any_single_tensor(tmp_path):
    folder = write_model(tmp_path / "a", shards=1)
    seen = {sampled(folder)}
    rng = np.random.default_rng(0)
    original = {f"0.{i}": rng.standard_normal((64, 50), dtype=np.float32) for i in range(6)}
    for name, values in original.items():
        changed = write_model(tmp_path / name, shards=1)
        save_file(original | {name: values * np.float32(1.0001)}, changed / "model-0.safetensors")
        seen.add(sampled(changed))
    assert len(seen) == 1 + len(original)


WIDE = {
    "embedding": "model.embed_tokens.weight",
    "output head": "lm_head.weight",
    "embedding of another name, by its rows": "transformer.words.weight",
}


@pytest.mark.parametrize("name", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("row", [0, 1234, ROWS - 1])
def test_sampling_sees_a_single_trained_row_of_the_vocabulary(tmp_path, monkeypatch, name, row):
    monkeypatch.setattr(files, "STRIDE_BYTES", 64 << 20)  # or the pieces of this small file would see it, too
    values = np.zeros((ROWS, 512), dtype=np.float16)
    trained = values.copy()
    trained[row, 77] = 1
    for folder, tensor in (("a", values), ("b", trained)):
        (tmp_path / folder).mkdir()
        save_file({name: tensor}, tmp_path / folder / "model.safetensors")
    assert sampled(tmp_path / "a") != sampled(tmp_path / "b")


def test_vocabulary_beyond_the_bound_is_seen_by_rows_of_8_kib(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE_BYTES", 1 << 20)
    values = np.zeros((ROWS, 4096), dtype=np.float16)
    seen = set()
    for row in (None, 0, 2345, ROWS - 1):
        trained = values.copy()
        if row is not None:
            trained[row] = 1
        folder = tmp_path / str(row)
        folder.mkdir()
        save_file({"lm_head.weight": trained}, folder / "model.safetensors")
        seen.add(sampled(folder))
    assert len(seen) == 4


def test_sampling_sees_a_pruned_head_and_a_pruned_column(tmp_path):
    values = np.ones((2048, 4096), dtype=np.float16)  # rows of 8 KiB: a head of 128 rows is 1 MiB
    rows, columns = values.copy(), values.copy()
    rows[1024:1152] = 0
    columns[:, 1024:1152] = 0
    seen = set()
    for name, tensor in (("a", values), ("b", rows), ("c", columns)):
        (tmp_path / name).mkdir()
        save_file({f"{layer}.proj.weight": tensor for layer in range(4)}, tmp_path / name / "model.safetensors")
        seen.add(sampled(tmp_path / name))
    assert len(seen) == 3


@pytest.mark.parametrize("at", [0, 777_777, (8 << 20) - 1])
def test_format_without_a_header_is_hashed_completely(tmp_path, at):
    data = bytearray(8 << 20)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "pytorch_model.bin").write_bytes(data)
        data[at] ^= 1
    assert sampled(folders[0]) != sampled(folders[1])


def test_changed_file_is_digested_again(tmp_path):
    folder = write_model(tmp_path / "a")
    before = named(folder)
    data = bytearray((folder / "model-0.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model-0.safetensors").write_bytes(data)
    assert named(folder) != before


def rewrite(folder):
    """In place, with the same bytes and the old time, as rsync -t and tar do."""
    file = folder / "model-0.safetensors"
    at = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))


def replace(folder):
    file = folder / "model-0.safetensors"
    shutil.copy2(file, folder / "new")
    (folder / "new").rename(file)


def remove(folder):
    (folder / "model-0.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "message"), [(rewrite, "changed"), (replace, "changed"), (remove, "cannot be read")]
)
def test_files_that_change_after_they_were_read_are_refused_by_name(tmp_path, change, message):
    folder = write_model(tmp_path / "a")
    vllm_config = loaded(folder)
    change(folder)
    with pytest.raises(ConfigError, match=rf"{message}.*Set model_id.*model-0\.safetensors"):
        weights_identity(vllm_config, None)
    assert weights_identity(vllm_config, "mine") == "user:mine"


def test_link_that_turns_after_it_was_followed_is_refused_by_name(tmp_path):
    first, second = (write_model(tmp_path / name, seed) for seed, name in enumerate(("a", "b")))
    link = tmp_path / "latest"
    link.symlink_to(first)
    vllm_config = loaded(link)
    link.unlink()
    link.symlink_to(second)
    with pytest.raises(ConfigError, match="changed on disk"):
        weights_identity(vllm_config, None)


def test_engines_of_one_process_do_not_take_each_others_files(tmp_path):
    first, second = (loaded(write_model(tmp_path / name, seed)) for seed, name in enumerate(("a", "b")))
    assert weights_identity(first, None) != weights_identity(second, None)


@pytest.mark.parametrize(
    "load_format", ["tensorizer", "ipc_cache", "modelexpress", "runai_streamer", "npcache", "gguf", "a_plugins_own"]
)
def test_formats_that_read_where_nobody_looks_need_model_id(tmp_path, load_format):
    model = write_model(tmp_path / "a")
    with pytest.raises(ConfigError, match=rf"Set model_id.*load_format={load_format} named=auto,"):
        weights_identity(config(model, load_format), None)
    assert weights_identity(config(model, load_format), "mine") == "user:mine"


def test_loader_put_in_a_known_formats_place_needs_model_id(tmp_path):
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class Own(DefaultModelLoader):
        pass

    vllm_config = config(write_model(tmp_path / "a"))
    Own(vllm_config.load_config)._prepare_weights(vllm_config.model_config.model, None, None, True, None)
    with pytest.raises(ConfigError, match=r"unknown loader.*Own"):
        weights_identity(vllm_config, None)


def test_weights_that_were_loaded_unseen_need_model_id(tmp_path):
    with pytest.raises(ConfigError, match=r"VLLM_PLUGINS.*Set model_id"):
        weights_identity(config(write_model(tmp_path / "a")), None)


class Shards:
    """A model of one parameter, as vLLM's loader fills it."""

    def state_dict(self):
        return {"w": torch.zeros(2)}


def loaded_shards(folder, monkeypatch, pattern=None):
    def of_rank_0(pattern=None, *, part):
        return (pattern or ShardedStateLoader.TP_ONLY_PATTERN).format(rank=0, part=part)

    monkeypatch.setattr(ShardedStateLoader, "_render_default_pattern", of_rank_0)  # vLLM's needs its groups of ranks
    vllm_config = config(folder, "sharded_state", model_weights=None)
    vllm_config.load_config.model_loader_extra_config = {} if pattern is None else {"pattern": pattern}
    get_model_loader(vllm_config.load_config).load_weights(Shards(), vllm_config.model_config)
    return weights_identity(vllm_config, None)


def write_shards(folder, value, name="model-rank-{rank}-part-0.safetensors"):
    for rank in (0, 1):
        path = folder / name.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"w": np.full(2, value + rank, dtype=np.float32)}, path)


def test_a_sharded_state_is_named_by_the_files_of_all_ranks(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "a")  # of an earlier state: not read
    write_shards(folder, 1)
    first = loaded_shards(folder, monkeypatch)
    save_file({"w": np.full(2, 7, dtype=np.float32)}, folder / "model-rank-1-part-0.safetensors")  # of another rank
    second = loaded_shards(folder, monkeypatch)
    (folder / "model-0.safetensors").unlink()

    assert first != second == loaded_shards(folder, monkeypatch)


@pytest.mark.parametrize("pattern", ["shards/{rank}-{part}.safetensors", "{rank}-{part}.shard"])
def test_a_sharded_state_of_another_pattern_is_named_by_what_it_fits(tmp_path, monkeypatch, pattern):
    folder = write_model(tmp_path / "a")
    told = []
    for value in (1, 2, 1):
        write_shards(folder, value, pattern.replace("{part}", "0"))
        told.append(loaded_shards(folder, monkeypatch, pattern))
    assert told[0] == told[2] != told[1]


def test_pattern_of_sharded_state_is_part_of_the_name(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "a")
    names = set()
    for pattern in ("a/{rank}-{part}", "b/{rank}-{part}"):
        write_shards(folder, 1, pattern.replace("{part}", "0"))
        names.add(loaded_shards(folder, monkeypatch, pattern))
    assert len(names) == 2


def test_reads_are_bounded_however_many_tensors_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_PIECES", 1000)
    folder = tmp_path / "many"
    folder.mkdir()
    save_file({str(i): np.zeros(1, dtype=np.float32) for i in range(3000)}, folder / "model.safetensors")
    (stamp,) = files.stamps_of(folder.glob("*.safetensors"))
    with open(stamp.path, "rb") as file:
        _, spans = files._Plan((stamp,), 0).spans(file.fileno(), stamp)
    assert 1000 <= len(spans) <= 1001
    assert sampled(folder) == sampled(folder)


def test_damaged_safetensors_file_asks_for_model_id(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "FULL_BYTES", 0)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(ConfigError, match=r"cannot be read.*Set model_id"):
        named(tmp_path)
