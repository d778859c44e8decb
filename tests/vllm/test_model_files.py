"""Files beside the weights: which count, by content, wherever the model lies."""

from types import SimpleNamespace

import pytest

from tiered_kv.errors import ConfigError
from tiered_kv.vllm import model_files as door
from tiered_kv.vllm.model_files import FILES_MAX, NOT_COUNTED, model_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config(path, *, trusts=False, auto_map=None, code_revision=None):
    model = SimpleNamespace(
        model=str(path), revision=None, trust_remote_code=trusts, code_revision=code_revision,
        hf_config=SimpleNamespace(auto_map=auto_map),
    )  # fmt: skip
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(download_dir=None))


def found(path, *, is_named=False, **more):
    return model_files(config(path, **more), is_named=is_named)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (*NOT_COUNTED, "model.safetensors.index.json", "preprocessor_config.json", "model.safetensors", "a.py"):
        (folder / name).write_text("1")
    (folder / "directory.json").mkdir()
    return folder


def test_files_of_processors_and_of_unknown_names_count_by_their_content(model):
    before = found(model)
    assert list(before) == ["preprocessor_config.json"]
    (model / "preprocessor_config.json").write_text("2")
    assert found(model) != before
    (model / "hf_quant_config.json").write_text("1")
    assert list(found(model)) == ["hf_quant_config.json", "preprocessor_config.json"]


@pytest.mark.parametrize("name", [*sorted(NOT_COUNTED), "model.safetensors.index.json", "model.safetensors", "a.py"])
def test_other_files_do_not(model, name):
    before = found(model)
    (model / name).write_text("another")
    assert found(model) == before


def test_the_models_code_counts_where_vllm_may_run_it(model):
    (model / "sub").mkdir()
    (model / "sub" / "b.py").write_text("1")
    before = found(model, trusts=True)
    assert list(before) == ["a.py", "preprocessor_config.json", "sub/b.py"]
    (model / "sub" / "b.py").write_text("2")
    assert found(model, trusts=True) != before


def test_code_of_another_repository_counts_at_the_revision_asked_for(model, tmp_path, monkeypatch):
    for revision in ("one", "two"):
        (tmp_path / revision).mkdir()
        (tmp_path / revision / "modeling.py").write_text(revision)
    local = door.local_path
    monkeypatch.setattr(
        door,
        "local_path",
        lambda name, proof, revision=None, cache_dir=None: (
            tmp_path / revision if name == "org/code" else local(name, proof, revision, cache_dir)
        ),
    )
    asked = {"trusts": True, "auto_map": {"AutoModelForCausalLM": "org/code--modeling.Model", "AutoConfig": "own.C"}}
    one, two = (found(model, **asked, code_revision=revision) for revision in ("one", "two"))
    assert one["org/code/modeling.py"] != two["org/code/modeling.py"]
    monkeypatch.setattr(door, "local_path", local)
    with pytest.raises(ConfigError, match="code of another repository.*repository=org/code"):
        found(model, **asked)


@pytest.fixture
def snapshot(tmp_path):
    """As the hub's cache has it: a small file by git's digest, and a large one by SHA-256."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    (snapshot / "checkpoint-500").mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    large = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
    for name, blob in (("preprocessor_config.json", "56a6051ca2b02b04ef92d5150c9ef600403cb1de"), ("large.json", large)):
        (blobs / blob).write_text("1")
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_a_snapshot_is_its_commit_however_much_of_it_was_downloaded(snapshot):
    (snapshot / "checkpoint-500" / "preprocessor_config.json").write_text("2")
    assert found(snapshot) == f"hf:{COMMIT}"
    (snapshot / "large.json").unlink()
    assert found(snapshot) == f"hf:{COMMIT}"
    assert list(found(snapshot / "checkpoint-500")) == ["preprocessor_config.json"]
    # Named by the user, who may have the same files in a folder of his own elsewhere.
    assert list(found(snapshot, is_named=True)) == ["preprocessor_config.json"]


@pytest.mark.parametrize("how", ["through the link", "in its place", "a link elsewhere", "a new file"])
def test_a_snapshot_that_somebody_edited_is_named_by_content(snapshot, tmp_path, how):
    """Editors write through links; either way the commit does not say any more what vLLM reads."""
    file = snapshot / ("preprocessor_config.json" if how != "a new file" else "processor_config.json")
    if how == "a link elsewhere":
        (tmp_path / "56a6051ca2b02b04ef92d5150c9ef600403cb1de").write_text("1")
        file.unlink()
        file.symlink_to(tmp_path / "56a6051ca2b02b04ef92d5150c9ef600403cb1de")
    else:
        if how == "in its place":
            file.unlink()
        file.write_text("edited")
    assert file.name in found(snapshot)


def test_code_in_a_snapshot_that_somebody_edited_is_named_by_content(snapshot):
    (snapshot / "modeling.py").write_text("edited")
    assert found(snapshot) == f"hf:{COMMIT}", "nobody runs it"
    assert "modeling.py" in found(snapshot, trusts=True)


def test_a_file_stands_for_its_folder(model):
    assert found(model / "model.safetensors") == found(model)


def test_a_model_that_is_not_here_is_named_by_the_user_or_refused(tmp_path):
    with pytest.raises(ConfigError, match="not on this machine. Set model_id"):
        found("s3://bucket/model")
    assert found("s3://bucket/model", is_named=True) == "model_id"


def test_many_files_have_one_digest(model):
    for number in range(FILES_MAX + 1):
        (model / f"x{number}.json").write_text("1")
    before = found(model)
    assert before.startswith(f"{FILES_MAX + 2} files, sha256:")
    (model / "x7.json").write_text("2")
    assert found(model) != before


def test_a_file_that_cannot_be_read_is_refused(model):
    (model / "memory.json").symlink_to("/proc/self/mem")  # a file whose first byte nobody may read
    with pytest.raises(ConfigError, match="cannot be read"):
        found(model)
