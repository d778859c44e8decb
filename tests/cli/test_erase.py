"""`tiered-kv evict --tag`: a tenant's chunks go from a directory, a bucket and a running server, and nobody else's."""

import errno
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.clients import SmallEngine, poll_until, settings
from tests.kit.server.probe import figures, socket_of, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.disk_probe import blob_files
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import Tier, complaint, directory_tier, refuse_deletions, report, run, s3_tier, tier_of
from tiered_kv.config import Config
from tiered_kv.keys.naming import BlobName, relative_path
from tiered_kv.keys.tags import tag_digest
from tiered_kv.ops import disk_storage
from tiered_kv.ops.storage import FOR_GOOD
from tiered_kv.tiers.disk import scan
from tiered_kv.tiers.disk.files import read_head

ONE, TWO = Model(), Model(weights="two")
MINE, THEIRS, SHARED = tokens(1, 4), tokens(2, 3), tokens(1, 2) + tokens(3, 1)
TAG = "tenant-a GmbH"
DIGEST = tag_digest(TAG).hex()


@pytest.fixture(params=["disk", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """A tenant's prompt, one that another asked for behind its beginning, others, and some of nobody."""
    made = tier_of(request, tmp_path)
    with made.open() as storage:
        ONE.store(storage, MINE, tag=TAG)
        ONE.store(storage, SHARED, tag="tenant-b")  # two chunks of it are there
        ONE.store(storage, THEIRS, tag="tenant-b")
        TWO.store(storage, MINE, tag=TAG)
        TWO.store(storage, THEIRS)
    return made


def there(tier: Tier, model: Model, prompt: list[int]) -> list[bool]:
    """Which chunks of a prompt are there."""
    with tier.open() as storage:
        return storage.contains(model.names(prompt))


def evict(tier: Tier, *arguments: object, code: int = 0) -> dict:
    done = run("evict", tier.uri, *tier.sets(), *arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_a_tag_goes_with_everything_behind_it_and_nothing_else(tier: Tier) -> None:
    done = evict(tier, "--tag", TAG, "--yes")
    assert (done["tag"], done["selected"], done["pinned"], done["tiers"][0]["kept"]) == (DIGEST, 9, 0, 0)
    assert done["tiers"][0]["removed"] == 9
    assert not any(there(tier, ONE, MINE) + there(tier, ONE, SHARED) + there(tier, TWO, MINE))
    assert all(there(tier, ONE, THEIRS) + there(tier, TWO, THEIRS))
    again = evict(tier, "--tag", TAG, "--yes")
    assert (again["selected"], again["tiers"], again["notes"]) == (0, [], [])
    assert "nothing to remove" in run("evict", tier.uri, *tier.sets(), "--tag", TAG, "--yes").stdout


def test_a_namespace_limits_it_and_a_dry_run_changes_nothing(tier: Tier) -> None:
    space = TWO.namespace.digest.hex()
    assert evict(tier, "--tag", TAG, "--namespace", space[:8], "--dry-run")["selected"] == 4
    assert evict(tier, "--tag", TAG, "--dry-run")["selected"] == 9
    assert "Say --yes" in complaint("evict", tier.uri, *tier.sets(), "--tag", TAG, code=5)
    assert all(there(tier, ONE, MINE) + there(tier, TWO, MINE))
    assert evict(tier, "--tag", TAG, "--namespace", space, "--yes")["tiers"][0]["removed"] == 4
    assert all(there(tier, ONE, MINE)) and not any(there(tier, TWO, MINE))


def test_pins_do_not_hold_it_up_and_go_with_it(tier: Tier) -> None:
    with tier.open() as storage:
        storage.pin([ONE.names(MINE)[3], ONE.names(SHARED)[2], ONE.names(THEIRS)[0]], FOR_GOOD)
    done = evict(tier, "--tag", TAG, "--yes")
    assert (done["pinned"], done["tiers"][0]["removed"]) == (0, 9)
    with tier.open() as storage:
        assert dict(storage.pins()) == {ONE.names(THEIRS)[0]: FOR_GOOD}


def test_ls_and_inspect_show_the_digest(tier: Tier) -> None:
    listed = report("ls", tier.uri, *tier.sets(), "--tag", TAG)
    assert listed["chunk_count"] == 8 and {chunk["tag"] for chunk in listed["chunks"]} == {DIGEST}
    plain = {chunk["tag"] for chunk in report("ls", tier.uri, *tier.sets(), "--limit", 0)["chunks"]}
    is_disk = tier.uri.startswith("file:")
    assert plain == ({DIGEST, tag_digest("tenant-b").hex(), None} if is_disk else {None}), "a listing reads no header"
    assert report("ls", tier.uri, *tier.sets(), "--tag", "nobody")["chunks"] == []
    key = ONE.names(MINE)[0].key.hex()
    assert report("inspect", tier.uri, *tier.sets(), key)["tag"] == DIGEST
    assert DIGEST in run("inspect", tier.uri, *tier.sets(), key).stdout
    key = TWO.names(THEIRS)[0].key.hex()
    assert report("inspect", tier.uri, *tier.sets(), key)["tag"] is None


def test_what_nobody_can_judge_is_told(s3, tmp_path: Path) -> None:
    tier = s3_tier(s3)
    with tier.open() as storage:
        damaged, other = ONE.store(storage, MINE, tag=TAG)[1:3]
        storage.discard([damaged, other])
        blobs = dict(ONE.blobs(MINE, TAG))
        storage.write(damaged, memoryview(bytes(8192)))
        storage.write(other, memoryview(blobs[other].replace(b'"0003"', b'"0001"')))
    done = evict(tier, "--tag", TAG, "--yes")
    assert done["selected"] == 4, "behind what is the tenant's everything goes, whatever it is"
    with tier.open() as storage:
        storage.write(damaged, memoryview(bytes(8192)))
        storage.write(other, memoryview(blobs[other].replace(b'"0003"', b'"0001"')))
    first, second = evict(tier, "--tag", TAG, "--yes")["notes"]
    assert first.startswith("1 chunks of another format version") and second.startswith(
        "1 chunks have a damaged header"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tag", ""], "option --tag: expected 1 to 256 characters"),
        (["--tag", "secret" * 50], "option --tag: expected 1 to 256 characters"),
        (["--tag", "secret", "--all"], "contradict each other"),
        (["--tag", "secret", "--bytes", "1GiB"], "contradict each other"),
        (["--tag", "secret", "--key", ONE.names(MINE)[0].key.hex()], "contradict each other"),
        (["--tag", "secret", "--namespace", "abcdabcd"], "no namespace here begins"),
    ],
)
def test_orders_that_mean_nothing_are_refused(tmp_path: Path, arguments: list[str], expected: str) -> None:
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, MINE, tag=TAG)
    said = complaint("evict", made.uri, *arguments, "--yes")
    assert expected in said and "secret" not in said
    assert all(there(made, ONE, MINE))


def test_no_tag_text_is_in_a_directory_or_a_report(tmp_path: Path) -> None:
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, MINE, tag=TAG)
        storage.pin([ONE.names(MINE)[3]], FOR_GOOD)
    said = run("evict", made.uri, *made.sets(), "--tag", TAG, "--dry-run").output
    said += run("ls", made.uri, "--tag", TAG, "--json").output + run("stat", made.uri, "--json").output
    assert TAG not in said
    for path in (tmp_path / "kv").rglob("*"):
        assert TAG not in str(path) and (not path.is_file() or TAG.encode() not in path.read_bytes())


def test_a_directory_without_its_index_tells_whose_a_chunk_is_by_its_header(tmp_path: Path) -> None:
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, MINE, tag=TAG)
        ONE.store(storage, THEIRS)
    for path in (tmp_path / "kv" / "index").iterdir():
        path.unlink()
    assert evict(made, "--tag", TAG, "--yes")["tiers"][0]["removed"] == 4
    assert all(there(made, ONE, THEIRS))


def test_a_chunk_that_another_tenant_stored_after_the_last_flush_is_that_tenants(tmp_path: Path) -> None:
    """Its size and name are those of the chunk that was there before: an index has not heard of it."""
    made, root = directory_tier(tmp_path / "kv"), tmp_path / "kv"
    with made.open() as storage:
        ONE.store(storage, MINE, tag=TAG)
    for name, data in ONE.blobs(MINE, "tenant-b"):
        (root / "blobs" / relative_path(name)).write_bytes(data)
    assert report("ls", made.uri, "--tag", TAG)["chunks"] == []
    assert evict(made, "--tag", TAG, "--yes")["selected"] == 0
    assert evict(made, "--tag", "tenant-b", "--yes")["tiers"][0]["removed"] == 4


# -- proving that nothing is left -------------------------------------------------------------------------------------


def test_a_proof_ends_with_0_only_where_nothing_was_found(tier: Tier) -> None:
    proof = "--tag", TAG, "--expect-none"
    assert (done := evict(tier, *proof, "--dry-run", code=4))["is_none_left"] is False and done["selected"] == 9
    assert all(there(tier, ONE, MINE)), "a dry run looks"
    assert evict(tier, *proof, "--yes", code=4)["is_none_left"] is False, "what was found is gone, and it was there"
    for mode in ("--dry-run", "--yes"):
        assert (done := evict(tier, *proof, mode))["is_none_left"] is True and done["selected"] == 0
    assert "nothing of this tag was found here" in run("evict", tier.uri, *tier.sets(), *proof, "--dry-run").stdout
    assert evict(tier, "--tag", TAG, "--yes")["is_none_left"] is None, "nobody asked for it"


def test_what_does_not_tell_whose_it_is_is_no_proof(tier: Tier, tmp_path: Path) -> None:
    proof = "--tag", TAG, "--expect-none", "--dry-run"
    evict(tier, "--tag", TAG, "--yes")
    assert evict(tier, *proof)["is_none_left"] is True
    name, data = ONE.blobs(tokens(9, 1), TAG)[0]
    other = "--namespace", TWO.namespace.digest.hex()
    for stored in (bytes(8192), data.replace(b'"0003"', b'"0001"')):  # damaged, and of another format version
        if tier.uri.startswith("file:"):
            path = tmp_path / "kv" / "blobs" / relative_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stored)
        else:
            with tier.open() as storage:
                storage.discard([name])
                storage.write(name, memoryview(stored))
        done = evict(tier, *proof, code=4)
        assert (done["selected"], done["unjudged"], done["is_none_left"]) == (0, 1, False)
        said = run("evict", tier.uri, *tier.sets(), *proof).stdout
        assert "cannot be told whose it is" in said and "of this tag" not in said
        done = evict(tier, *proof, *other)
        assert done["is_none_left"] is True, "of that namespace all can be judged"
        assert "only this namespace was looked at: another may hold more of this tag" in done["notes"]
        if stored == bytes(8192):
            run("verify", tier.uri, *tier.sets(), "--repair", "--yes")
            assert evict(tier, *proof)["is_none_left"] is True


def test_a_damaged_header_is_no_proof_where_an_index_that_may_be_wrong_tells(tmp_path: Path) -> None:
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        names = ONE.store(storage, THEIRS, tag="tenant-b")
    path = tmp_path / "kv" / "blobs" / relative_path(names[-1])
    path.write_bytes(bytes(path.stat().st_size))
    done = evict(made, "--tag", TAG, "--expect-none", "--dry-run", code=4)
    assert (done["selected"], done["unjudged"]) == (0, 1) and "1 chunks have a damaged header" in str(done["notes"])


def test_what_a_crash_cut_off_is_no_proof_until_it_is_collected(tmp_path: Path) -> None:
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, THEIRS)
    (tmp_path / "kv" / "tmp").mkdir(exist_ok=True)
    (tmp_path / "kv" / "tmp" / "123-1").write_bytes(b"K" * 8192)
    done = evict(made, "--tag", TAG, "--expect-none", "--yes", code=4)
    assert done["unjudged"] == 1 and done["notes"][0].startswith("1 write under way or cut off, and nobody knows whose")
    (tmp_path / "kv" / "tmp" / "123-1").unlink()
    assert evict(made, "--tag", TAG, "--expect-none", "--yes")["is_none_left"] is True


@pytest.mark.parametrize("kind", ["directory", "prefix of a bucket"])
def test_a_place_where_nothing_lies_is_no_proof(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """As behind a slip in its name."""
    made = directory_tier(tmp_path / "kv") if kind == "directory" else s3_tier(request.getfixturevalue("s3"))
    asked = "evict", made.uri, *made.sets(), "--tag", TAG, "--expect-none", "--dry-run"
    assert "no file of a cache lies in" in complaint(*asked)
    with made.open() as storage:
        names = ONE.store(storage, THEIRS)
        storage.discard(names)
    assert run(*asked).exit_code == 0


@pytest.mark.parametrize("slip", ["", "kv", "kv/blobs"])
def test_what_holds_a_cache_deeper_in_it_is_no_place_of_one(tmp_path: Path, slip: str) -> None:
    """A part of its name was left out, or another medium's was named: the chunks counted as files of nobody."""
    for made in (directory_tier(tmp_path / "kv"), Tier(f"shared+file://{tmp_path}/kv/run/0")):
        Path(made.uri.partition("://")[2]).mkdir(parents=True, exist_ok=True)
        with made.open() as storage:
            ONE.store(storage, MINE, tag=TAG)
    said = complaint("evict", f"shared+file://{tmp_path}/{slip}", "--tag", TAG, "--expect-none", "--dry-run")
    below = {"": "kv/blobs, kv/run/0", "kv": "blobs, run/0", "kv/blobs": "."}
    assert f"files of another cache lie in shared+file://{tmp_path}" in said and f"below {below[slip]}, of" in said


def test_what_a_server_once_left_in_a_wrong_place_makes_no_cache_of_it(tmp_path: Path) -> None:
    """It was started there before somebody saw the slip; or the medium's name is wrong."""
    for made in (directory_tier(tmp_path / "disk"), Tier(f"shared+file://{tmp_path}/bucket/kv")):
        Path(made.uri.partition("://")[2]).mkdir(parents=True, exist_ok=True)
        with made.open() as storage:
            ONE.store(storage, MINE, tag=TAG)
    for slip, below in (("bucket", "kv"), ("disk", "blobs")):
        left = tmp_path / slip / "_tiered_kv" / "epochs" / ("ab" * 16) / "7"
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"numbers below are retired\n")
        said = complaint("evict", f"shared+file://{tmp_path}/{slip}", "--tag", TAG, "--expect-none", "--yes")
        assert f"files of another cache lie in shared+file://{tmp_path}/{slip}, below {below}, of" in said


def test_a_cache_deeper_in_another_is_not_looked_at_and_a_note_says_so(s3) -> None:
    """As of a team that has its own prefix in the bucket whose root is everybody's."""
    tier, proof = s3_tier(s3), ("--tag", TAG, "--expect-none")
    own, _, options = tier.uri.partition("?")
    team = Tier(f"{own}/team/kv?{options}", tier.settings)
    for made, prompt in ((tier, THEIRS), (team, MINE)):
        with made.open() as storage:
            ONE.store(storage, prompt, tag=TAG)
    assert evict(tier, *proof, "--yes", code=4)["selected"] == 3
    done = evict(tier, *proof, "--yes")
    assert done["is_none_left"] is True and "below team/kv, of which this proves nothing" in done["notes"][0]
    assert all(there(team, ONE, MINE)), "it was not looked at"


def test_beside_other_files_and_probes_a_proof_is_one(s3) -> None:
    tier = s3_tier(s3)
    proof = "--tag", TAG, "--expect-none", "--dry-run"
    with tier.open() as storage:
        storage.store.put("notes/readme.txt", b"none of a cache's")
        assert "no file of a cache lies in" in complaint("evict", tier.uri, *tier.sets(), *proof)
        ONE.store(storage, THEIRS)
        storage.store.put("_tiered_kv/probe/" + "ab" * 16, b"probe")  # of a server that starts at the moment
    assert evict(tier, *proof)["unjudged"] == 0


@pytest.mark.parametrize("other", ["--all", "--stored-by=vllm<1", "--bytes=1GiB"])
def test_a_proof_is_of_a_tag(tier: Tier, other: str) -> None:
    assert "--expect-none goes with --tag" in complaint(
        "evict", tier.uri, *tier.sets(), "--expect-none", other, "--yes"
    )


# -- while a server runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def engine(root: Path):
    one = SmallEngine.start(settings(root))
    one.store(6, tag=TAG)
    one.store(4, first_token=100_000, tag="tenant-b")
    one.wait_hits(6)
    wait_written(root)
    yield one
    one.close()


def files(root: Path) -> int:
    return len(blob_files(root))


def test_memory_and_disk_of_a_running_server_lose_a_tag(engine: SmallEngine, root: Path) -> None:
    report("pin", f"file://{root}", engine.keys(6).keys[5].hex())
    dry = report("evict", "--server", socket_of(root), "--tag", TAG, "--dry-run")
    assert (dry["selected"], dry["tiers"]) == (6, [])
    done = report("evict", "--server", socket_of(root), "--tag", TAG, "--yes")
    assert [(t["tier"], t["removed"], t["kept"]) for t in done["tiers"]] == [("host", 6, 0), ("disk", 6, 0)]
    assert (done["tag"], done["selected"], files(root)) == (DIGEST, 6, 4)
    assert engine.hits(6) == 0 and engine.hits(4, first_token=100_000) == 4
    assert report("ls", f"file://{root}", "--tag", TAG)["chunks"] == []
    again = report("evict", "--server", socket_of(root), "--tag", TAG, "--yes")
    assert [t["removed"] + t["kept"] for t in again["tiers"]] == [0, 0]
    engine.store(6, tag=TAG)
    engine.wait_hits(6)


def test_a_server_proves_that_nothing_is_left_in_its_memory_and_on_its_disk(engine: SmallEngine, root: Path) -> None:
    server, uri = Tier(f"--server={socket_of(root)}"), Tier(f"file://{root}")
    proof = "--tag", TAG, "--expect-none"
    said = complaint("evict", uri.uri, *proof, "--yes")
    assert "the memory of this directory's server may hold more of it: name --server" in said and files(root) == 10
    assert "cannot be looked into" in complaint("evict", server.uri, *proof, "--dry-run")
    said = complaint("evict", server.uri, "--tier", "disk", *proof, "--yes")
    assert "one tier of a server proves nothing" in said and files(root) == 10
    lookup, answer = engine.look_up(3)
    assert answer.ready == 3
    assert evict(server, *proof, "--yes", code=4)["is_none_left"] is False
    engine.client.release(lookup)
    poll_until(engine.client, lambda: figures(root)["hierarchy"]["leased_bytes"] == 0, "the lease's end")
    assert evict(server, *proof, "--yes", code=4)["is_none_left"] is False, "what was in use was there until now"
    assert evict(server, *proof, "--yes")["is_none_left"] is True
    assert engine.hits(6) == 0 and files(root) == 4
    engine.store(1, tag=TAG)
    engine.wait_hits(1)
    assert evict(server, *proof, "--yes", code=4)["is_none_left"] is False, "a request that ran on"


def test_a_server_proves_it_of_a_directory_with_files_of_another_cache(engine: SmallEngine, root: Path) -> None:
    """Its memory was erased, and then it was refused."""
    name = blob_files(root)[0]
    below = root / "blobs" / "copied" / name.parent.parent.name / name.parent.name
    below.mkdir(parents=True)
    (below / name.name).write_bytes(name.read_bytes())
    server, proof = Tier(f"--server={socket_of(root)}"), ("--tag", TAG, "--expect-none", "--yes")
    evict(server, *proof, code=4)
    done = evict(server, *proof)
    assert done["is_none_left"] is True and "below blobs/copied, of which this proves nothing" in done["notes"][0]


def test_what_is_in_memory_alone_is_found_by_a_proof(engine: SmallEngine, root: Path) -> None:
    server, proof = Tier(f"--server={socket_of(root)}"), ("--tag", TAG, "--expect-none", "--yes")
    assert report("evict", server.uri, "--tier", "disk", "--tag", TAG, "--yes")["tiers"][0]["removed"] == 6
    first = evict(server, *proof, code=4)
    assert (first["selected"], first["is_none_left"]) == (0, False), "no file has it"
    assert [(t["tier"], t["removed"]) for t in first["tiers"]] == [("host", 6), ("disk", 0)]
    assert evict(server, *proof)["is_none_left"] is True


@pytest.mark.parametrize("behind", [6, 3])
def test_a_tail_in_memory_goes_and_is_found_by_a_proof(engine: SmallEngine, root: Path, behind: int) -> None:
    """No file and no listing has it before memory lets go of it."""
    engine.store_tail(behind, 16)
    wait_for(lambda: figures(root)["hierarchy"]["host_tails"] == 1, "the tail")
    server = Tier(f"--server={socket_of(root)}")
    first = evict(server, "--tag", TAG, "--expect-none", "--yes", code=4)
    assert [(t["tier"], t["removed"]) for t in first["tiers"]] == [("host", 7), ("disk", 6)]
    assert figures(root)["hierarchy"]["host_tails"] == 0
    assert evict(server, "--tag", TAG, "--expect-none", "--yes")["is_none_left"] is True


def test_a_dry_run_says_that_it_does_not_look_into_memory(engine: SmallEngine, root: Path) -> None:
    for what in (("--tag", TAG), ("--all",)):
        done = report("evict", "--server", socket_of(root), "--tier", "host", *what, "--dry-run")
        assert (done["selected"], done["tiers"]) == (0, [])
        assert done["notes"] == ["what the server's memory holds of it goes, too; a dry run does not look there"]
    assert report("evict", "--server", socket_of(root), "--tier", "disk", "--all", "--dry-run")["notes"] == []
    assert engine.hits(6) == 6


def test_by_its_uri_the_disk_is_meant_and_the_memory_named(engine: SmallEngine, root: Path) -> None:
    tier = Tier(f"file://{root}")
    done = evict(tier, "--tag", TAG, "--yes")
    assert done["tiers"][0]["removed"] == 6 and files(root) == 4
    assert done["notes"] == ["the memory of this directory's server may hold more of it: say it with --server, too"]
    assert engine.hits(6) == 6, "from memory"


def test_one_tier_alone_may_be_named(engine: SmallEngine, root: Path) -> None:
    done = report("evict", "--server", socket_of(root), "--tag", TAG, "--tier", "host", "--yes")
    assert [(t["tier"], t["removed"]) for t in done["tiers"]] == [("host", 6)] and files(root) == 10
    done = report("evict", "--server", socket_of(root), "--tag", TAG, "--tier", "disk", "--yes")
    assert [(t["tier"], t["removed"]) for t in done["tiers"]] == [("disk", 6)] and files(root) == 4


def test_what_is_in_use_stays_is_told_and_ends_with_4(engine: SmallEngine, root: Path) -> None:
    lookup, answer = engine.look_up(3)
    assert answer.ready == 3
    done = run("evict", "--server", socket_of(root), "--tag", TAG, "--yes", "--json")
    assert done.exit_code == 4, done.output
    host, disk = json.loads(done.stdout)["tiers"]
    assert (host["removed"], host["kept"]) == (3, 3)
    assert (disk["removed"], disk["kept"]) == (4, 2), "the chunks before one that is in use"
    text = run("evict", "--server", socket_of(root), "--tag", TAG, "--yes")
    assert text.exit_code == 4 and "stay because they are in use; say it again later" in text.stdout
    engine.client.release(lookup)
    poll_until(engine.client, lambda: figures(root)["hierarchy"]["leased_bytes"] == 0, "the lease's end")
    done = report("evict", "--server", socket_of(root), "--tag", TAG, "--yes")
    assert [(t["removed"], t["kept"]) for t in done["tiers"]] == [(3, 0), (2, 0)]
    assert engine.hits(6) == 0 and files(root) == 4


def test_what_cannot_be_deleted_is_said_to_stay_and_ends_with_4(
    engine: SmallEngine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_deletions(root, monkeypatch)
    done = run("evict", f"file://{root}", "--tag", TAG, "--yes", "--json")
    assert done.exit_code == 4, done.output
    (disk,) = json.loads(done.stdout)["tiers"]
    assert disk == {"tier": "disk", "removed": 0, "removed_bytes": 0, "kept": 0, "missing": 0, "failed": 6}


def test_a_server_without_a_disk_tier_loses_it_from_its_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    uri = f"shared+file://{tmp_path / 'bucket'}"
    config = Config.from_mapping({"storage_uri": uri, "host_bytes": "8MiB", "chunk_tokens": 64, "drain_s": 5.0})
    engine = SmallEngine.start(config)
    try:
        engine.store(4, tag=TAG)
        engine.store(2, first_token=100_000)
        engine.wait_hits(4)
        wait_written(config.server_directory())
        address = socket_of(config.server_directory())
        lookup, answer = engine.look_up(4)
        assert answer.ready == 4
        for _ in range(2):
            done = evict(Tier(f"--server={address}"), "--tag", TAG, "--expect-none", "--yes", code=4)
            assert (done["selected"], done["is_none_left"]) == (0, False), "what is in use alone is no proof"
            assert [(t["tier"], t["removed"], t["kept"]) for t in done["tiers"]] == [("host", 0, 4)]
        engine.client.release(lookup)
        leased = lambda: figures(config.server_directory())["hierarchy"]["leased_bytes"]  # noqa: E731
        poll_until(engine.client, lambda: leased() == 0, "the lease's end")
        done = report("evict", "--server", address, "--tag", TAG, "--yes")
        assert [(t["tier"], t["removed"], t["kept"]) for t in done["tiers"]] == [("host", 4, 0)]
        done = report("evict", uri, "--tag", TAG, "--yes")
        assert [(t["tier"], t["removed"]) for t in done["tiers"]] == [("object", 4)]
        assert engine.hits(4) == 0 and engine.hits(2, first_token=100_000) == 2
        engine.store(4, tag="tenant-c")  # what a server learns from a bucket, it knows by its header
        engine.wait_hits(4)
        wait_written(config.server_directory())
        report("evict", "--server", address, "--all", "--tier", "host", "--yes")
        space = "--namespace", engine.client.namespace.digest.hex()
        done = evict(Tier(f"--server={address}"), "--tag", TAG, "--expect-none", "--yes", *space)
        assert done["notes"] == ["only this namespace was looked at: another may hold more of this tag"]
        engine.wait_hits(4)
        done = report("evict", "--server", address, "--tag", "tenant-c", "--yes")
        assert done["tiers"][0]["removed"] == 4
    finally:
        engine.close()
        end_server(config.server_directory())


def test_what_is_being_read_from_a_bucket_is_not_here_after_a_proof(s3: S3, tmp_path: Path) -> None:
    """Another machine has put it there, and only its header, which has not come yet, tells whose it is."""
    place, proof = s3_tier(s3), ("--tag", TAG, "--expect-none", "--yes")
    with ExitStack() as at_end:
        proxy = at_end.enter_context(FaultProxy(s3.endpoint_url))

        def machine(name: str, endpoint_url: str) -> SmallEngine:
            root = tmp_path / name
            more = {"storage_uri": place.uri, "storage_options": s3.options(endpoint_url), "disk_path": str(root)}
            one = SmallEngine.start(settings(root, storage_timeout_s=60, promotion_wait_ms=60_000, **more))
            at_end.callback(end_server, root)
            at_end.callback(one.close)
            return one

        here, there = machine("here", proxy.url), machine("there", s3.endpoint_url)
        there.store(2, tag=TAG)
        wait_written(there.root)
        with proxy.failing(Fault(Mode.DRIP, kinds={"GET"}, path=".safetensors", bytes_per_s=100)):
            proxy.forget()
            keys = here.keys(2)
            lookup = here.client.lookup(keys.keys, keys.digests)
            assert lookup is not None
            poll_until(here.client, lambda: proxy.count("GET", ".safetensors") >= 2, "the reads")
            for root in (there.root, here.root):
                run("evict", "--server", socket_of(root), "--tag", TAG, "--yes")
            assert evict(place, "--tag", TAG, "--yes")["tiers"][0]["removed"] == 2
            for uri in (there.root, here.root):
                assert evict(Tier(f"--server={socket_of(uri)}"), *proof)["is_none_left"] is True
            assert evict(place, *proof)["is_none_left"] is True
        answers = here.client.lookups
        poll_until(here.client, lambda: answers[lookup].is_answered and answers[lookup].is_done, "the answer")
        assert answers[lookup].ready == 0
        here.client.release(lookup)
        wait_written(here.root)
        assert evict(Tier(f"--server={socket_of(here.root)}"), *proof)["is_none_left"] is True
        assert not blob_files(here.root)


def test_a_tier_in_which_nothing_can_be_erased_is_named(mooncake_member, tmp_path: Path) -> None:
    """What it holds of the tag comes back when it is asked for, and no command finds it there."""
    pool, _ = mooncake_member
    root = tmp_path / "kv"
    engine = SmallEngine.start(settings(root, storage_uri=pool.uri("erase"), disk_path=str(root)))
    try:
        engine.store(3, tag=TAG)
        wait_written(root)
        server, proof = Tier(f"--server={socket_of(root)}"), ("--tag", TAG, "--expect-none", "--yes")
        evict(server, *proof, code=4)
        done = evict(server, *proof)
        assert done["is_none_left"] is True, "of what can be erased nothing is"
        (text,) = done["notes"]
        assert text.startswith("this server's mooncake tier may hold more of it, of which nothing can be erased")
        assert engine.hits(3) == 3, "as it says"
    finally:
        engine.close()
        end_server(root)


def test_a_file_that_the_server_does_not_know_goes_too(
    engine: SmallEngine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored from a backup while it runs: to the server it is not there, and to the next one it would be."""
    monkeypatch.setattr(disk_storage, "REMOVAL_WAIT_S", 1.0)  # the server will not remove it
    name = BlobName(engine.client.namespace.digest, engine.keys(6).keys[5])
    path = root / "blobs" / relative_path(name)
    data = path.read_bytes()
    report("evict", "--server", socket_of(root), "--tag", TAG, "--yes")
    assert not path.exists()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    done = evict(Tier(f"file://{root}"), "--tag", TAG, "--yes")
    assert (done["tiers"][0]["removed"], done["tiers"][0]["kept"]) == (1, 0) and not path.exists()


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """A file in whose place the disk has a bad sector."""

    def read_others(wanted: Path | str, length: int) -> bytes:
        if str(wanted) == str(path):
            raise OSError(errno.EIO, "Input/output error")
        return read_head(wanted, length)

    with pytest.MonkeyPatch.context() as patch:
        for module in (scan, disk_storage):
            patch.setattr(module, "read_head", read_others)
        yield


def test_a_file_that_cannot_be_read_makes_an_erasure_incomplete(
    engine: SmallEngine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_storage, "REMOVAL_WAIT_S", 1.0)  # the server will not remove it
    path = root / "blobs" / relative_path(BlobName(engine.client.namespace.digest, engine.keys(6).keys[5]))
    data = path.read_bytes()
    report("evict", "--server", socket_of(root), "--tag", TAG, "--yes")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data + bytes(4096))  # of another size than an index that was not written yet says
    tier = Tier(f"file://{root}")
    with unreadable(path):
        done = evict(tier, "--tag", TAG, "--yes", code=4)
        assert (done["unread"], done["selected"]) == (1, 0) and path.exists()
        assert done["notes"][0].startswith("1 chunks cannot be read now")
    engine.close()
    end_server(root)
    with unreadable(path):
        done = evict(tier, "--tag", TAG, "--expect-none", "--dry-run", code=4)
        assert (done["unread"], done["selected"], done["is_none_left"]) == (1, 0, False)
    done = evict(tier, "--tag", TAG, "--yes")
    assert (done["unread"], done["tiers"][0]["removed"]) == (0, 1) and not path.exists()


def test_of_a_new_chunk_that_cannot_be_read_the_index_tells(tmp_path: Path) -> None:
    """It may have that from what lay there before, so the erasure is not complete; all else goes."""
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, MINE, tag=TAG)
        ONE.store(storage, THEIRS)
    with unreadable(tmp_path / "kv" / "blobs" / relative_path(ONE.names(MINE)[2])):
        done = evict(made, "--tag", TAG, "--yes", code=4)
    assert (done["unread"], done["tiers"][0]["removed"]) == (1, 4)
    assert all(there(made, ONE, THEIRS)) and not any(there(made, ONE, MINE))


def test_what_waits_to_be_written_is_never_written(tmp_path: Path, root: Path) -> None:
    """A disk that stands still holds writes up; they are dropped, and nothing of the tag is on it once it is back."""
    engine = SmallEngine.start(settings(root))
    engine.store(40, tag=TAG)  # more than are written at once
    wait_for(lambda: figures(root)["pending_writes"] > 0 or files(root) > 30, "writes")
    deadline_s = time.monotonic() + 30
    while True:
        done = run("evict", "--server", socket_of(root), "--tag", TAG, "--yes", "--json")
        assert done.exit_code in (0, 4), done.output
        counts = [t["removed"] + t["kept"] for t in json.loads(done.stdout)["tiers"]]
        if done.exit_code == 0 and not any(counts):
            break
        assert time.monotonic() < deadline_s
    wait_written(root)
    assert files(root) == 0 and engine.hits(40) == 0
    engine.close()


def test_what_a_crash_cut_off_is_told_because_nobody_knows_whose_it_is(tmp_path: Path) -> None:
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, THEIRS, tag=TAG)
    (tmp_path / "kv" / "tmp").mkdir(exist_ok=True)
    (tmp_path / "kv" / "tmp" / "123-1").write_bytes(b"K" * 8192)
    (said,) = evict(made, "--tag", "somebody else", "--yes")["notes"]
    assert said.startswith("1 write under way or cut off") and "tiered-kv gc" in said
