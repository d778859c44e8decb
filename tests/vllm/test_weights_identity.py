"""Weights identity on real files: equal for equal weights wherever they lie, different for any other."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from tiered_kv.errors import ConfigError
from tiered_kv.vllm import weights
from tiered_kv.vllm.weights import digest_files, file_stamps, weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config(model, load_format="auto", **model_fields):
    """The parts of VllmConfig that are read."""
    fields = {"model": str(model), "model_weights": "", "revision": None, "seed": 0} | model_fields
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def write_model(folder, seed=0, shards=2):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for shard in range(shards):
        tensors = {f"{shard}.{i}": rng.standard_normal((64, 50), dtype=np.float32) for i in range(6)}
        save_file(tensors, folder / f"model-{shard}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def sampled(folder):
    return digest_files(file_stamps(folder, weights.WEIGHT_SUFFIXES), 0)


def full(folder):
    return digest_files(file_stamps(folder, weights.WEIGHT_SUFFIXES), weights.FULL_BYTES)


def test_model_id_is_the_users_word_and_nothing_is_read(tmp_path):
    assert weights_identity(config(tmp_path / "nothing"), "mine") == "user:mine"


def test_dummy_weights_are_named_by_their_seed(tmp_path):
    assert weights_identity(config(tmp_path, load_format="dummy", seed=7), None) == "dummy:7"


def test_snapshot_of_the_hub_cache_is_named_by_its_commit(tmp_path):
    folder = write_model(tmp_path / "models--a--b" / "snapshots" / COMMIT)
    link = tmp_path / "current"
    link.symlink_to(folder)
    assert weights_identity(config(folder), None) == weights_identity(config(link), None) == f"hf:{COMMIT}"


def test_repository_name_is_resolved_in_the_hub_cache(tmp_path):
    write_model(tmp_path / "models--org--name" / "snapshots" / COMMIT)
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    vllm_config = config("org/name")
    vllm_config.load_config.download_dir = str(tmp_path)
    assert weights_identity(vllm_config, None) == f"hf:{COMMIT}"


def test_copy_in_another_directory_has_the_same_identity(tmp_path):
    folder = write_model(tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b", copy_function=shutil.copyfile)
    identity = weights_identity(config(folder), None)
    assert identity.startswith("sha256:")
    assert weights_identity(config(tmp_path / "b"), None) == identity
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


def test_changed_file_is_digested_again(tmp_path):
    folder = write_model(tmp_path / "a")
    before = weights_identity(config(folder), None)
    data = bytearray((folder / "model-0.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model-0.safetensors").write_bytes(data)
    assert weights_identity(config(folder), None) != before


def test_reads_are_bounded_however_many_tensors_there_are(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    tensors = {str(i): np.zeros(1, dtype=np.float32) for i in range(weights.MAX_READS + 10)}
    save_file(tensors, folder / "model.safetensors")
    header = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert len(list(weights._tensor_middles(header[8 : 8 + size], weights.MAX_READS))) == weights.MAX_READS
    assert sampled(folder) == sampled(folder)


def test_gguf_file_is_a_model_of_its_own(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"one")
    (tmp_path / "b.gguf").write_bytes(b"two")
    first, second = (weights_identity(config(tmp_path / name), None) for name in ("a.gguf", "b.gguf"))
    assert first != second


@pytest.mark.parametrize("model", ["s3://bucket/model", "org/never-downloaded", "empty"])
def test_unreadable_weights_ask_for_model_id(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="Set model_id"):
        weights_identity(config(model), None)


def test_damaged_safetensors_file_asks_for_model_id(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "FULL_BYTES", 0)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(ConfigError, match=r"cannot be read.*Set model_id"):
        weights_identity(config(tmp_path), None)
