"""`tiered-kv explain`: hits and misses of real prompts, offline and beside a server; no token id is shown."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.kit.s3 import S3
from tests.kit.samples.formats import rehashed
from tests.kit.server import object_nodes
from tests.kit.server.clients import CHUNK as ENGINE_CHUNK
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import wait_for, wait_written
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.chunks.header import PREFIX_SHA256
from tiered_kv.cli.app import app
from tiered_kv.cli.explain import ExplainReport
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName, object_path, relative_path
from tiered_kv.ops.explain import explain as explain_prompt
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.prompts import prompt_keys
from tiered_kv.ops.storage import Storage

Place = tuple[str, list[str]]
"""A URI and the options that reach it."""


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, root: Path) -> Place:
    """An empty tier of each kind."""
    if request.param == "disk":
        root.mkdir()
        return f"file://{root}", []
    s3: S3 = request.getfixturevalue("s3")
    return s3.uri(s3.new_prefix()), ["--set", f"storage_options={json.dumps(s3.options())}"]


ON_DISK = pytest.mark.parametrize("place", ["disk"], indirect=True)
"""For what does not depend on the medium: clients of S3 take their time."""


def opened(place: Place) -> Storage:
    uri, more = place
    return open_storage(uri, {"storage_options": json.loads(more[1].partition("=")[2])} if more else {})


def is_disk(place: Place) -> bool:
    return place[0].startswith("file://")


@pytest.fixture
def explain(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the verb with --json, and of a directory as people do; no token id or salt may appear in what it prints."""

    def run(place: Place, prompt: list[int], *more: str) -> dict[str, Any]:
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(prompt))
        arguments = ["explain", place[0], "--tokens", str(file), *place[1], *more]
        report = CliRunner().invoke(app, [*arguments, "--json"])
        shown = CliRunner().invoke(app, arguments) if is_disk(place) else None
        for result in (report, shown):
            if result is None:
                continue
            assert result.exit_code == 0, (result.stderr, result.exception)
            numbers = set(re.findall(r"(?<![\w.])\d+(?![\w.])", result.output))
            assert not numbers & {str(token) for token in prompt if token > 100_000}
            assert "sesame" not in result.output
        msgspec.json.decode(report.stdout, type=ExplainReport)
        explained: dict[str, Any] = json.loads(report.stdout)
        explained["shown"] = shown.stdout if shown is not None else ""
        return explained

    return run


def runs(report: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(run["first"], run["last"], run["state"]) for run in report["runs"]]


def test_a_whole_hit_with_a_tail(place: Place, explain) -> None:
    with opened(place) as storage:
        Model().store(storage, tokens(1, 6))
    report = explain(place, tokens(1, 6, tail=7))
    assert runs(report) == [(0, 5, "here")]
    assert (report["hit_chunks"], report["hit_tokens"], report["tail_tokens"]) == (6, 6 * CHUNK, 7)
    assert (report["siblings"], report["others"], report["notes"]) == (None, [], [])
    assert report["namespace"] == Model().namespace.digest.hex()
    if is_disk(place):
        assert "The last 7 tokens are no full chunk and never stored, but as a tail (tail_tokens)." in report["shown"]
        assert "0-5" in report["shown"] and f"0..{6 * CHUNK - 1}" in report["shown"]


@ON_DISK
@pytest.mark.parametrize(
    ("config", "is_computed"),
    [
        ({"layer_types": ["full_attention"], "sliding_window": 64}, False),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, True),
        ({"sliding_window": 64}, True),
        ({"layer_types": ["chunked_attention"], "attention_chunk_size": 64}, True),
    ],
)
def test_a_prompt_that_ends_with_a_chunk_is_offered_less_where_layers_attend_to_windows(
    place: Place, explain, config: dict[str, object], is_computed: bool
) -> None:
    model = Model(fields={"text_config": config})
    with opened(place) as storage:
        model.store(storage, tokens(1, 6))
    report = explain(place, tokens(1, 6))
    assert (report["hit_chunks"], report["hit_tokens"]) == (6 - is_computed, (6 - is_computed) * CHUNK)
    assert (report["here_chunks"], report["see"], runs(report)) == (6, None, [(0, 5, "here")])
    assert ("attend to windows" in report["hit_text"]) is ("attend to windows" in report["shown"]) is is_computed
    longer = explain(place, tokens(1, 6, tail=1))
    assert (longer["hit_chunks"], "attend to windows" in longer["hit_text"]) == (6, False)


def test_the_first_diverging_chunk_is_named_with_what_continues_there(place: Place, explain) -> None:
    shared = tokens(1, 3)
    with opened(place) as storage:
        Model().store(storage, shared + tokens(2, 2), shared + tokens(3, 1))
    report = explain(place, shared + tokens(4, 3))
    assert runs(report) == [(0, 2, "here"), (3, 3, "missing"), (4, 5, "missing")]
    assert report["siblings"] == 2
    first = report["runs"][1]
    assert (first["first_token"], first["last_token"]) == (3 * CHUNK, 4 * CHUNK - 1)
    assert first["text"] == "not stored: first diverging chunk; other prompts continue here with 2 other chunks"


@ON_DISK
def test_a_prompt_that_goes_on_where_nothing_does(place: Place, explain) -> None:
    with opened(place) as storage:
        Model().store(storage, tokens(1, 2))
    report = explain(place, tokens(1, 3))
    assert runs(report) == [(0, 1, "here"), (2, 2, "missing")]
    assert report["siblings"] == 0
    assert "nothing was ever stored behind the chunk before it, or it was evicted" in report["runs"][1]["text"]


def test_a_gap_makes_what_is_behind_it_unreachable(place: Place, explain) -> None:
    with opened(place) as storage:
        names = Model().store(storage, tokens(1, 5))
        (gone,) = [blob for blob in storage.look().blobs if blob.name == names[2]]
        storage.remove([gone], holes=True)
    report = explain(place, tokens(1, 5))
    assert runs(report) == [(0, 1, "here"), (2, 2, "missing"), (3, 4, "unreachable")]
    assert "evicted or deleted; 2 chunks of this prompt behind it" in report["runs"][1]["text"]


@ON_DISK
def test_a_prompt_that_no_namespace_has(place: Place, explain) -> None:
    with opened(place) as storage:
        Model().store(storage, tokens(1, 2))
    report = explain(place, tokens(9, 2))
    assert runs(report) == [(0, 0, "missing"), (1, 1, "missing")]
    assert (report["hit_chunks"], report["siblings"]) == (0, 1)
    assert "other prompts begin with 1 other chunk" in report["runs"][0]["text"]
    assert runs(explain(place, tokens(9, 0, tail=5))) == []


def test_an_empty_tier(place: Place, explain) -> None:
    report = explain(place, tokens(1, 2))
    assert (report["namespace"], report["runs"], report["hit_chunks"]) == (None, [], 0)
    assert "holds no namespace" in report["shown"] or not is_disk(place)


# -- headers ----------------------------------------------------------------------------------------------------------


def replace(storage: Storage, name: BlobName, change: Callable[[bytearray], bytearray]) -> None:
    """Change a stored blob behind everybody's back."""
    data = storage.read(name)
    assert data is not None
    changed = bytes(change(bytearray(data)))
    if storage.kind == "object":
        storage.store.put(object_path(name), changed)
    else:
        (storage.root / "blobs" / relative_path(name)).write_bytes(changed)
    assert storage.read(name) == changed != data


def collide(blob: bytearray) -> bytearray:
    blob[PREFIX_SHA256.slice] = b"0" * PREFIX_SHA256.width
    return rehashed(blob)


def flip(blob: bytearray) -> bytearray:
    blob[PREFIX_SHA256.offset] ^= 1
    return blob


def foreign(blob: bytearray) -> bytearray:
    other = Model(weights="other")
    made = bytearray(other.form.blob_bytes)
    other.form.seal(memoryview(made), ChunkRecord(other.namespace.digest, bytes(16), bytes(16), 0, bytes(32)), 1)
    return made


CHANGES = (
    (collide, "collision", "other tokens"),
    (flip, "damaged", "header"),
    (foreign, "foreign", "namespace"),
    (lambda blob: blob[:1000], "damaged", ""),
    (lambda blob: bytearray(len(blob)), "damaged", ""),
)


def test_a_name_alone_is_no_hit(place: Place) -> None:
    with opened(place) as storage:
        names = [Model().store(storage, tokens(seed, 3))[1] for seed in range(len(CHANGES))]
    with opened(place) as storage:
        for seed, (change, state, word) in enumerate(CHANGES):
            replace(storage, names[seed], change)
            runs = explain_prompt(storage, tokens(seed, 3), storage.look()).runs
            assert [(run.first, run.last, run.state) for run in runs] == [
                (0, 0, "here"), (1, 1, state), (2, 2, "unreachable")
            ]  # fmt: skip
            assert word in runs[1].text and "a miss" in runs[1].text and "path=" not in runs[1].text


# -- namespaces -------------------------------------------------------------------------------------------------------


def other_of(report: dict[str, Any], model: Model) -> dict[str, Any]:
    (found,) = [o for o in report["others"] if o["namespace"] == model.namespace.digest.hex()]
    return found


def test_the_namespace_with_most_of_the_prompt_is_chosen_and_the_others_differ_by_name(place: Place, explain) -> None:
    rope = Model(fields={"text_config": {"hidden_size": 1024, "rope_theta": "500000.0", "rope_scaling": None}})
    longer, wide = Model(fields={"max_model_len": 8192}), Model(fields={"chunk_tokens": 2 * CHUNK, "tp": 2})
    with opened(place) as storage:
        Model().store(storage, tokens(1, 4))
        rope.store(storage, tokens(1, 2))
        longer.store(storage, tokens(1, 1))
        Model(weights="nothing of it").store(storage, tokens(5, 5))
        storage.write_record(wide.namespace)
    report = explain(place, tokens(1, 4))
    assert (report["namespace"], report["hit_chunks"]) == (Model().namespace.digest.hex(), 4)
    assert [o["chunks"] for o in report["others"]] == [2, 1]
    (theta,) = other_of(report, rope)["differs"]
    assert (theta["field"], theta["here"], theta["there"]) == ("text_config.rope_theta", "10000.0", "500000.0")
    (length,) = other_of(report, longer)["differs"]
    assert (length["field"], length["here"], length["there"]) == ("max_model_len", 4096, 8192)
    assert "LongRoPE" in length["meaning"]
    assert "text_config.rope_theta" in report["shown"] or not is_disk(place)

    named = explain(place, tokens(1, 4), "--namespace", rope.namespace.digest.hex()[:12])
    assert (named["hit_chunks"], named["chosen_by"]) == (2, "named by --namespace")
    assert other_of(named, Model())["chunks"] == 4
    empty = explain(place, tokens(1, 4), "--namespace", wide.namespace.digest.hex())
    assert (empty["chunk_tokens"], empty["prompt_chunks"], empty["hit_chunks"]) == (2 * CHUNK, 2, 0)
    assert {d["field"] for d in other_of(empty, Model())["differs"]} == {"chunk_tokens", "tp"}


@ON_DISK
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("settings.model_files.preprocessor_config.json", "sha256:2", "a file beside the weights, or code"),
        ("settings.environment.VLLM_MARLIN_INPUT_DTYPE", "int8", "an environment variable of vLLM"),
        ("settings.model_config.runner", "pooling", "a setting of vLLM"),
        ("settings.device_capability", "9.0", "GPUs of another generation"),
        ("text_config.<null>", ["norm_topk_prob"], "says null of and another leaves out"),
        ("text_config.rope_theta", "500000.0", "config.json"),
        ("outer_config_sha256", "2", "config.json around its text_config"),
        ("model_dtype", "float32", "vLLM's --dtype"),
        ("quantization", "fp8", "vLLM's --quantization"),
        ("draft.weights", "sha256v2:2", "--speculative-config"),
        ("weights", "sha256v2:2", "another model, another revision"),
    ],
)
def test_a_field_that_differs_is_told_with_what_it_is_of(
    place: Place, explain, field: str, value: object, said: str
) -> None:
    names = field.split(".", 2)
    fields: Any = value
    for name in reversed(names[1:]):
        fields = {name: fields}
    other = Model(fields={names[0]: fields})
    with opened(place) as storage:
        Model().store(storage, tokens(1, 2))
        other.store(storage, tokens(1, 1))
    report = explain(place, tokens(1, 2))
    told = [one for one in other_of(report, other)["differs"] if one["field"].startswith(field)]
    assert told and all(said in one["meaning"] for one in told)
    assert said in report["shown"]


@ON_DISK
def test_long_values_are_cut_where_they_differ(place: Place, explain) -> None:
    """Of two names of weights a column showed the same beginning."""
    beginning = "user:/models/production/llama-3-8b-instruct/step-"
    ours, theirs = (Model(fields={"weights": f"{beginning}{step} of the second run"}) for step in ("1000", "2000"))
    with opened(place) as storage:
        ours.store(storage, tokens(1, 2))
        theirs.store(storage, tokens(1, 1))
    (row,) = [row for row in explain(place, tokens(1, 2))["shown"].splitlines() if row.startswith("weights")]
    assert "1000" in row and "2000" in row


@ON_DISK
def test_keys_of_another_chunk_size_are_found(place: Place, explain) -> None:
    with opened(place) as storage:
        storage.write_record(Model().namespace)
        half = Model(fields={"chunk_tokens": CHUNK // 2})
        storage.write_record(half.namespace)
        keys = prompt_keys(half.namespace, CHUNK // 2, tokens(1, 2), "")
        for index, key in enumerate(keys.keys):
            blob = bytearray(half.form.blob_bytes)
            name = BlobName(half.namespace.digest, key, keys.parent(index), index)
            record = ChunkRecord(name.namespace, key, name.parent, index, keys.digests[index])
            half.form.seal(memoryview(blob), record, 1)
            storage.write(name, memoryview(blob))
    report = explain(place, tokens(1, 2))
    assert (report["chunk_tokens"], report["hit_chunks"], report["hit_tokens"]) == (CHUNK // 2, 4, 2 * CHUNK)


@ON_DISK
def test_a_salt_changes_every_key(place: Place, explain) -> None:
    prompt = tokens(1, 2)
    with opened(place) as storage:
        Model().store(storage, tokens(2, 1))
        keys = prompt_keys(Model().namespace, CHUNK, prompt, "open sesame")
        for index, key in enumerate(keys.keys):
            blob = bytearray(Model().form.blob_bytes)
            name = BlobName(Model().namespace.digest, key, keys.parent(index), index)
            record = ChunkRecord(name.namespace, key, name.parent, index, keys.digests[index])
            Model().form.seal(memoryview(blob), record, 1)
            storage.write(name, memoryview(blob))
    assert explain(place, prompt, "--salt", "open sesame")["hit_chunks"] == 2
    assert explain(place, prompt)["hit_chunks"] == 0
    assert explain(place, prompt, "--salt", "sesame")["hit_chunks"] == 0


@pytest.mark.parametrize(
    ("place", "kind"), [("disk", "base"), ("disk", "shared"), ("s3", "shared")], indirect=["place"]
)
def test_after_a_reset_the_epoch_in_force_is_explained(place: Place, explain, kind: str) -> None:
    with opened(place) as storage:
        is_told = kind == ("base" if storage.kind == "disk" else "shared")
        old, new = Model(epoch=f"{kind}-0"), Model(epoch=f"{kind}-1")
        old.store(storage, tokens(1, 4))
        base = Namespace.from_fields(old.namespace.fields | {"epoch": ""}).digest.hex()
        if storage.kind == "disk":
            (storage.root / "epochs.json").write_text(json.dumps({base: 1}))
        else:
            storage.store.put(f"_tiered_kv/epochs/{base}/1", b"retired")
    report = explain(place, tokens(1, 4))
    assert (report["hit_chunks"], report["is_retired"]) == (4, is_told)
    assert report["hit_text"].startswith("of use to engines alone that have not been reset") is is_told
    assert report["see"] == ("docs/troubleshooting.md#no-hits" if is_told else None)
    assert ("no engine that starts now uses it" in report["shown"]) is is_told or not is_disk(place)
    with opened(place) as storage:
        new.store(storage, tokens(2, 1))
    report = explain(place, tokens(1, 4))
    assert report["namespace"] == (new if is_told else old).namespace.digest.hex()
    if is_told:
        assert report["hit_chunks"] == 0
        (epoch,) = other_of(report, old)["differs"]
        assert (epoch["field"], epoch["here"], epoch["there"]) == ("epoch", f"{kind}-1", f"{kind}-0")
        assert epoch["meaning"] == "a reset retired the epoch of the other one"


@ON_DISK
def test_a_namespace_without_a_record_is_left_out_and_said(place: Place, explain) -> None:
    with opened(place) as storage:
        Model().store(storage, tokens(1, 2))
        lost = Model(weights="lost")
        for name, data in lost.blobs(tokens(1, 2)):
            storage.write(name, memoryview(data))
    report = explain(place, tokens(1, 2))
    assert report["hit_chunks"] == 2
    assert report["notes"] == [f"namespace {lost.namespace.digest.hex()} was left out: there is no namespace.json"]
    named = ["--tokens", "-", "--namespace", lost.namespace.digest.hex()]
    result = CliRunner().invoke(app, ["explain", place[0], *place[1], *named], "1 2")
    assert result.exit_code == 2 and "cannot be explained: there is no namespace.json" in result.stderr


@ON_DISK
def test_rows_of_vllms_own_offloading_are_left_out_and_said(place: Place, explain) -> None:
    """Their keys come from vLLM's block hashes: of no prompt it is known here whether they have it."""
    rows = Model(fields={"rows": {"block_hash": "sha256"}})
    with opened(place) as storage:
        rows.store(storage, tokens(1, 2))
    report = explain(place, tokens(1, 2))
    assert (report["namespace"], report["hit_text"]) == (None, "no namespace here can be explained")
    assert "rows of vLLM's own offloading" in report["notes"][0]
    result = CliRunner().invoke(app, ["explain", place[0], "--tokens", "-"], "1 2")
    assert result.exit_code == 0 and "Whether this prompt is here is not known" in result.stdout
    named = ["--tokens", "-", "--namespace", rows.namespace.digest.hex()]
    result = CliRunner().invoke(app, ["explain", place[0], *named], "1 2")
    assert result.exit_code == 2 and "cannot be explained: its chunks are rows" in result.stderr
    with opened(place) as storage:
        Model().store(storage, tokens(1, 2))
    report = explain(place, tokens(1, 2))
    assert (report["namespace"], report["hit_chunks"]) == (Model().namespace.digest.hex(), 2)
    assert len(report["notes"]) == 1 and report["others"] == []


# -- the command ------------------------------------------------------------------------------------------------------


def test_tokens_come_from_standard_input_and_errors_say_what_to_do(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    with open_storage(f"file://{root}") as storage:
        Model().store(storage, tokens(1, 2))
    call = ["explain", f"file://{root}", "--json", "--tokens"]
    result = CliRunner().invoke(app, [*call, "-"], " ".join(map(str, tokens(1, 2))))
    assert json.loads(result.stdout)["hit_chunks"] == 2
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for arguments, code, expected in (
        ([str(tmp_path / "none")], 2, "cannot be read: No such file or directory"),
        ([str(tmp_path)], 2, "cannot be read: Is a directory"),
        ([str(tmp_path / "binary")], 2, "is no text file"),
        (["-", "--namespace", "ffff"], 2, "no namespace here begins with ffff"),
    ):
        result = CliRunner().invoke(app, [*call, *arguments], "1 2 3")
        assert (result.exit_code, result.stdout) == (code, "")
        assert expected in result.stderr
    result = CliRunner().invoke(app, ["explain", f"file://{tmp_path}/nowhere", "--tokens", "-"], "1")
    assert result.exit_code == 2 and "there is no such directory" in result.stderr


def test_beside_a_running_engine(root: Path, explain) -> None:
    engine = SmallEngine.start(settings(root))
    try:
        engine.store(6)
        engine.wait_hits(6)
        wait_written(root)
        place: Place = (f"file://{root}", [])
        prompt = list(range(8 * ENGINE_CHUNK))
        wait_for(lambda: explain(place, prompt)["hit_chunks"] == 6, "the chunks on disk")
        report = explain(place, prompt)
        assert engine.client.namespace is not None
        assert report["namespace"] == engine.client.namespace.digest.hex()
        assert runs(report)[0] == (0, 5, "here") and report["runs"][1]["state"] == "missing"
        assert engine.hits(6) == 6
    finally:
        engine.close()


def test_a_bucket_and_the_disk_in_front_of_it_beside_a_running_node(s3: S3, root: Path, explain) -> None:
    where = object_nodes.s3_place(s3, s3.new_prefix())
    bucket: Place = (where.uri, ["--set", f"storage_options={json.dumps(s3.options())}"])
    prompt = object_nodes.tokens(1, 5)
    with object_nodes.node(where.settings(root)) as cache:
        assert object_nodes.store(cache, 1, 4) == 4
        object_nodes.wait_uploaded(root)
        reports = [explain(place, prompt) for place in (bucket, (f"file://{root}", []))]
        assert object_nodes.load(cache, 1, 4) == 4
    for report in reports:
        assert runs(report) == [(0, 3, "here"), (4, 4, "missing")]
        assert (report["is_retired"], report["siblings"]) == (False, 0)
    assert reports[0]["namespace"] == reports[1]["namespace"]
