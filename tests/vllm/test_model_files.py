"""Files beside the weights: which count, by content, wherever the model lies."""

import hashlib
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.identity import model_files as door
from tiered_kv.vllm.identity.model_files import FILES_MAX, NOT_COUNTED, model_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config(path, *, trusts=False, auto_map=None, name=None, revision=None, code_revision=None, takes_media=False):
    model = SimpleNamespace(
        model=str(path), revision=revision, trust_remote_code=trusts, code_revision=code_revision,
        hf_config=SimpleNamespace(auto_map=auto_map, name_or_path=name or str(path)),
        multimodal_config=SimpleNamespace() if takes_media else None,
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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache of this machine; puts files of a commit there, as a download of just these does."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def download(name, commit, ref=None, /, **contents):
        below = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        for file, content in contents.items():
            path = below / "snapshots" / commit / file.replace("_", ".")
            path.unlink(missing_ok=True)
            link(path, git_name(content.encode()), content.encode())
        if ref is not None:
            (below / "refs").mkdir(exist_ok=True)
            (below / "refs" / ref).write_text(commit)

    return download


@pytest.fixture
def made_by_transformers(monkeypatch):
    """What vLLM has transformers compute; the models here are none that vLLM could ask its registry for."""

    def say(*, is_so):
        monkeypatch.setattr(door, "is_computed_by_transformers", lambda model: is_so)

    return say


OWN_CODE = {"AutoConfig": "configuration.C", "AutoModel": "modeling.M", "AutoTokenizer": ["tokens.T", None]}
OTHER = COMMIT[::-1]


def test_code_of_another_repository_counts_at_the_revision_asked_for(model, hub, made_by_transformers):
    """Of which the cache has what transformers asked for: the file of the class, and no config."""
    made_by_transformers(is_so=False)
    hub("org/code", COMMIT, "one", modeling_py="1")
    hub("org/code", OTHER, "two", modeling_py="2")
    asked = {"trusts": True, "auto_map": {"AutoModelForCausalLM": "org/code--modeling.Model", "AutoConfig": "own.C"}}
    one, two = (found(model, **asked, code_revision=revision) for revision in ("one", "two"))
    assert one["org/code/modeling.py"] != two["org/code/modeling.py"]
    assert list(found(model, **asked)) == ["a.py", "preprocessor_config.json"], "vLLM's own class: none was read"

    made_by_transformers(is_so=True)
    with pytest.raises(ConfigError, match="code of another repository.*repository=org/code"):
        found(model, **asked)


def test_code_counts_at_the_revision_asked_for_also_of_the_models_own_repository(hub, made_by_transformers):
    made_by_transformers(is_so=False)
    hub("org/name", COMMIT, "main", config_json="1", configuration_py="1", helper_py="1")
    hub("org/name", OTHER, "code", configuration_py="2", helper_py="1")
    asked = {"trusts": True, "auto_map": OWN_CODE, "name": "org/name"}
    plain = found("org/name", **asked)
    pinned = found("org/name", **asked, code_revision=OTHER)

    assert plain == found("org/name", **asked, code_revision=COMMIT) == f"hf:{COMMIT}"
    assert list(pinned) == ["snapshot", "own/configuration.py"]
    assert pinned == found("org/name", **asked, code_revision="code")


def test_a_model_that_transformers_computes_is_made_of_what_main_has_whatever_revision_was_asked_for(
    hub, made_by_transformers
):
    hub("org/name", COMMIT, "main", config_json="1", configuration_py="1", modeling_py="1")
    asked = {"trusts": True, "auto_map": OWN_CODE, "name": "org/name", "revision": COMMIT}
    made_by_transformers(is_so=True)
    before = found("org/name", **asked)
    hub("org/name", OTHER, "main", configuration_py="1", modeling_py="2")
    after = found("org/name", **asked)

    assert before == f"hf:{COMMIT}"
    assert list(after) == ["snapshot", "own@main/modeling.py"]
    assert found("org/name", **asked, is_named=True).keys() == {
        "configuration.py",
        "modeling.py",
        "own@main/modeling.py",
    }
    made_by_transformers(is_so=False)
    assert found("org/name", **asked) == before, "vLLM's own class: what main has was not read"


def test_code_of_a_processor_counts_though_the_models_config_does_not_name_it(model, hub, made_by_transformers):
    made_by_transformers(is_so=False)
    (model / "preprocessor_config.json").write_text('{"auto_map": {"AutoProcessor": "org/code--processing.P"}}')
    (model / "video_preprocessor_config.json").write_text("[1]")  # of no use to anybody, and no reason to fail
    hub("org/code", COMMIT, "main", processing_py="1")
    before = found(model, trusts=True, takes_media=True)
    hub("org/code", OTHER, "main", processing_py="2")
    after = found(model, trusts=True, takes_media=True)

    assert before["org/code/processing.py"] != after["org/code/processing.py"]
    assert "org/code/processing.py" not in found(model, takes_media=True)


def test_code_beside_a_config_that_lies_elsewhere_counts(model, tmp_path, made_by_transformers):
    """``--hf-config-path``: transformers reads the code there, not beside the weights."""
    made_by_transformers(is_so=True)
    beside = tmp_path / "config"
    beside.mkdir()
    told = []
    for content in "12":
        (beside / "modeling.py").write_text(content)
        told.append(found(model, trusts=True, auto_map=OWN_CODE, name=str(beside)))
    assert told[0]["own/modeling.py"] != told[1]["own/modeling.py"]
    assert list(told[0]) == ["a.py", "preprocessor_config.json", "own/modeling.py"]


def test_a_repository_in_mistrals_own_format_is_found(hub):
    """It has no config.json; the engine ran without the cache."""
    hub("mistralai/model", COMMIT, "main", params_json="1", tekken_json="1")
    assert found("mistralai/model") == f"hf:{COMMIT}"


@pytest.fixture
def snapshot(tmp_path):
    """As the hub's cache lays a model out: links to blobs that are called by git's hash, or SHA-256 for large files."""
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    link(folder / "preprocessor_config.json", git_name(b"1"), b"1")
    link(folder / "large.json", hashlib.sha256(b"2").hexdigest(), b"2")
    link(folder / "a.py", git_name(b"3"), b"3")
    return folder


def git_name(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def link(path, blob, content):
    blobs = path.parents[1].parent / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    (blobs / blob).write_bytes(content)
    path.symlink_to(f"../../blobs/{blob}")


def test_a_snapshot_is_its_commit_however_much_of_it_was_downloaded(snapshot):
    assert found(snapshot) == f"hf:{COMMIT}"
    assert found(snapshot, trusts=True) == f"hf:{COMMIT}"
    (snapshot / "large.json").unlink()
    assert found(snapshot) == f"hf:{COMMIT}"
    (snapshot / "checkpoint-500").mkdir()
    (snapshot / "checkpoint-500" / "preprocessor_config.json").write_text("2")
    assert found(snapshot) == f"hf:{COMMIT}"
    assert list(found(snapshot / "checkpoint-500")) == ["preprocessor_config.json"]
    # Named by the user, who may have the same files in a folder of his own elsewhere.
    assert list(found(snapshot, is_named=True)) == ["preprocessor_config.json"]


def test_snapshots_of_text_models_without_files_that_count_are_one_whatever_their_commit(tmp_path):
    """The hub's authors edit their README: a new commit of the same model."""
    snapshots = tmp_path / "models--org--name" / "snapshots"
    for folder in (snapshots / COMMIT, snapshots / COMMIT[::-1], tmp_path / "a copy"):
        folder.mkdir(parents=True)
        for name in ("config.json", "README.md", "model.safetensors.index.json"):
            (folder / name).write_text("1")
        assert found(folder) == {}
        if folder.parent == snapshots:
            # What prepares images may be fetched later; so may code.
            assert found(folder, takes_media=True) == found(folder, trusts=True) == f"hf:{folder.name}"


def test_a_snapshot_is_its_commit_through_a_link_to_it(snapshot, tmp_path):
    (tmp_path / "current").symlink_to(snapshot)
    assert found(tmp_path / "current") == f"hf:{COMMIT}"


@pytest.mark.parametrize("name", ["preprocessor_config.json", "large.json"])
def test_a_file_that_was_edited_in_a_snapshot_counts_by_its_content(snapshot, name):
    (snapshot / name).write_text("edited")  # through the link: the blob keeps its name
    edited = found(snapshot)
    assert list(edited) == ["large.json", "preprocessor_config.json"]
    (snapshot / name).unlink()
    (snapshot / name).write_text("edited")  # as editors do that write a new file
    assert found(snapshot) == edited


def test_code_that_was_edited_in_a_snapshot_counts_where_vllm_may_run_it(snapshot):
    (snapshot / "a.py").write_text("edited")
    assert found(snapshot) == f"hf:{COMMIT}"
    assert list(found(snapshot, trusts=True)) == ["a.py", "large.json", "preprocessor_config.json"]


def test_a_file_that_was_added_to_a_snapshot_counts(snapshot):
    (snapshot / "processor_config.json").write_text("1")
    assert "processor_config.json" in found(snapshot)


@pytest.mark.parametrize("name", ["adapters/retrieval/adapter_model.safetensors", "audio_tokenizer/model.safetensors"])
def test_weights_that_models_read_past_vllms_loaders_count(model, name):
    without = found(model)
    (model / name).parent.mkdir(parents=True)
    told = [without]
    for content in ("1", "22"):
        (model / name).write_text(content)
        told.append(found(model))
    assert told[0] != told[1] != told[2] != told[0]


def test_weights_that_models_read_past_vllms_loaders_count_in_a_snapshot(snapshot):
    blob = snapshot.parents[1] / "blobs" / hashlib.sha256(b"as sent").hexdigest()
    blob.write_bytes(b"as sent")
    weights = snapshot / "adapters" / "retrieval" / "adapter_model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.symlink_to(blob)
    sent = found(snapshot)
    blob.write_bytes(b"edited!")
    edited = found(snapshot)

    assert sent["snapshot"] == edited["snapshot"] == f"hf:{COMMIT}"
    assert sent != edited


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
