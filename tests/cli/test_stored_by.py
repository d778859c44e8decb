"""`--stored-by`: what a bad version stored goes from a directory, a bucket and a running server, and nothing else."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import socket_of, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.disk_probe import blob_files
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import Tier, complaint, directory_tier, report, run, s3_tier
from tiered_kv.chunks.header import peek
from tiered_kv.config import Config
from tiered_kv.keys.stored_by import stored_by
from tiered_kv.ops.storage import FOR_GOOD

BAD, GOOD, DEV, VEC = (
    stored_by(package, "vllm", version, encoding)
    for package, version, encoding in (
        ("0.9.0", "0.32.0", "cpu/amx"),
        ("0.9.1", "0.32.1", "cpu/amx"),
        ("0.9.1", "dev", "cpu/amx"),
        ("0.9.1", "0.32.1", "cpu/vec"),
    )
)
ONE, TWO = Model(), Model(weights="two")
FIRST, BEHIND, OTHER, ODD = tokens(1, 3), tokens(1, 2) + tokens(3, 2), tokens(2, 2), tokens(5, 1)


@pytest.fixture(params=["disk", "disk-without-index", "shared", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """The bad version's prompt, what the good one stored behind it and elsewhere, and another encoding."""
    if request.param == "s3":
        made = s3_tier(request.getfixturevalue("s3"))
    elif request.param == "shared":
        made = Tier(f"shared+file://{tmp_path}/bucket")
        (tmp_path / "bucket").mkdir()
    else:
        made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, FIRST, stored_by=BAD)
        ONE.store(storage, BEHIND, stored_by=GOOD)  # two chunks of it are there
        ONE.store(storage, OTHER, stored_by=GOOD)
        TWO.store(storage, FIRST, stored_by=GOOD)
        TWO.store(storage, OTHER, stored_by=VEC)
        TWO.store(storage, ODD, stored_by=DEV)
    if request.param == "disk-without-index":
        for path in (tmp_path / "kv" / "index").iterdir():
            path.unlink()
    return made


def there(tier: Tier, model: Model, prompt: list[int]) -> list[bool]:
    with tier.open() as storage:
        return storage.contains(model.names(prompt))


def call(verb: str, tier: Tier, *arguments: object, code: int = 0) -> dict:
    done = run(verb, tier.uri, *tier.sets(), *arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_what_a_bad_version_stored_goes_with_all_behind_it_and_nothing_else(tier: Tier) -> None:
    dry = call("evict", tier, "--stored-by", "vllm<0.32.1", "--dry-run")
    assert (dry["selected"], dry["tiers"], dry["stored_by"]) == (5, [], ["vllm<0.32.1"])
    done = call("evict", tier, "--stored-by", "vllm<0.32.1", "--yes")
    assert (done["selected"], done["tiers"][0]["removed"], done["tiers"][0]["kept"]) == (5, 5, 0)
    assert not any(there(tier, ONE, FIRST) + there(tier, ONE, BEHIND)), "what was loaded was computed on"
    assert all(there(tier, ONE, OTHER) + there(tier, TWO, FIRST) + there(tier, TWO, OTHER) + there(tier, TWO, ODD))
    (said,) = done["notes"]
    assert said.startswith("1 chunks were stored by a version that is neither before nor after another") and DEV in said
    again = call("evict", tier, "--stored-by", "vllm<0.32.1", "--yes")
    assert (again["selected"], again["tiers"]) == (0, [])


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        (["tiered_kv==0.9.0"], 5),
        (["tiered_kv==0.9.1"], 10),
        (["encoding=cpu/vec"], 2),
        (["encoding!=cpu/amx"], 2),
        (["encoding=cpu/*", "vllm==dev"], 1),
        (["vllm>=0.32.1", "encoding=cpu/amx"], 7),
        (["vllm>0.32.1"], 0),
        (["cache>=0"], 0),
    ],
)
def test_conditions_select_by_package_engine_and_encoding(tier: Tier, conditions: list[str], count: int) -> None:
    words = [word for text in conditions for word in ("--stored-by", text)]
    assert call("evict", tier, *words, "--dry-run")["selected"] == count
    space = TWO.namespace.digest.hex()[:8]
    here = {"tiered_kv==0.9.0": 0, "tiered_kv==0.9.1": 6, "vllm>=0.32.1": 3}.get(conditions[0], count)
    assert call("evict", tier, *words, "--namespace", space, "--dry-run")["selected"] == here


def test_ls_shows_who_stored_and_lists_by_it(tier: Tier) -> None:
    is_disk = tier.uri.startswith("file:")
    plain = {space["namespace"]: space for space in call("ls", tier)["namespaces"]}
    one, two = (plain[model.namespace.digest.hex()] for model in (ONE, TWO))
    assert (one["first_stored_by"], two["first_stored_by"]) == (BAD, GOOD)
    assert one["stored_by"] == ({GOOD: 4, BAD: 3} if is_disk else {}), "a listing reads no header"
    listed = call("ls", tier, "--stored-by", "vllm<0.32.1")
    assert listed["chunk_count"] == 3 and {chunk["stored_by"] for chunk in listed["chunks"]} == {BAD}
    assert {s["namespace"]: s["stored_by"] for s in listed["namespaces"]} == {
        ONE.namespace.digest.hex(): {GOOD: 4, BAD: 3},
        TWO.namespace.digest.hex(): {GOOD: 3, VEC: 2, DEV: 1},
    }
    text = run("ls", tier.uri, *tier.sets()).stdout
    assert "stored by" in text and BAD in text and (not is_disk or f"{GOOD}; {BAD}" in text)
    key = ONE.names(FIRST)[0].key.hex()
    assert call("inspect", tier, key)["stored_by"] == BAD
    assert BAD in run("inspect", tier.uri, *tier.sets(), key).stdout


@pytest.mark.parametrize("verb", ["ls", "verify", "evict"])
def test_a_version_that_is_too_short_is_said_with_what_means_more(tier: Tier, verb: str) -> None:
    words = ("--dry-run",) if verb == "evict" else ()
    done = run(verb, tier.uri, *tier.sets(), "--stored-by", "tiered_kv=0.9", *words)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert "a version is meant whole: 0.9.1 is not, and tiered_kv==0.9.* means all that begins so" in said
    done = run(verb, tier.uri, *tier.sets(), "--stored-by", "tiered_kv==0.9.*", *words)
    assert "is meant whole" not in done.stderr


def test_verify_reads_only_what_is_meant(tier: Tier) -> None:
    done = call("verify", tier, "--stored-by", "tiered_kv<0.9.1")
    assert (done["blobs"], done["read"], done["bad"], done["unreachable"]) == (3, 3, [], 0)
    assert done["stored_by"] == ["tiered_kv<0.9.1"]
    done = call("verify", tier, "--stored-by", "encoding=cpu/amx", "--stored-by", "vllm>=0.32.1")
    assert (done["read"], done["unreachable"]) == (7, 0), "those before them are there, and not read"
    with tier.open() as storage:
        damaged = ONE.names(FIRST)[2]
        (data,) = (data for name, data in ONE.blobs(FIRST, stored_by=BAD) if name == damaged)
        storage.discard([damaged])
        storage.write(damaged, memoryview(data[:-1] + bytes([data[-1] ^ 1])))
    assert call("verify", tier, "--stored-by", "vllm>=0.32.1")["bad"] == []
    found = call("verify", tier, "--stored-by", "vllm<0.32.1", code=4)["bad"]
    assert [(bad["reason"], bad["key"]) for bad in found] == [("payload", damaged.key.hex())]


def test_pins_do_not_hold_it_up_and_go_with_it(tier: Tier) -> None:
    with tier.open() as storage:
        storage.pin([ONE.names(BEHIND)[3], ONE.names(OTHER)[0]], FOR_GOOD)
    assert call("evict", tier, "--stored-by", "vllm==0.32.0", "--yes")["tiers"][0]["removed"] == 5
    with tier.open() as storage:
        assert dict(storage.pins()) == {ONE.names(OTHER)[0]: FOR_GOOD}


def test_a_copy_keeps_who_stored_it(tier: Tier, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    report("cp", tier.uri, f"file://{target}", *tier.sets("--from-set"), "--set", f"disk_bytes={1 << 30}")
    spaces = {s["namespace"]: s for s in report("ls", f"file://{target}")["namespaces"]}
    one = spaces[ONE.namespace.digest.hex()]
    assert (one["first_stored_by"], one["stored_by"]) == (BAD, {GOOD: 4, BAD: 3})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stored-by", "vllm"], "option --stored-by: expected a condition such as 'vllm<0.32.1'"),
        (["--stored-by", ""], "option --stored-by: expected a condition"),
        (["--stored-by", "vllm<1", "--stored-by", "vlm<1"], "one of tiered_kv, vllm, vllm_rows, cache, copy, encoding"),
        (["--stored-by", "encoding<cpu"], "encodings have no order"),
        (["--stored-by", "vllm<1", "--tag", "t"], "contradict each other"),
        (["--stored-by", "vllm<1", "--all"], "contradict each other"),
        (["--stored-by", "vllm<1", "--older-than", "7d"], "contradict each other"),
    ],
)
def test_orders_that_mean_nothing_are_refused(tmp_path: Path, arguments: list[str], expected: str) -> None:
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, FIRST, stored_by=BAD)
    assert expected in " ".join(complaint("evict", made.uri, *arguments, "--yes").split())
    assert all(there(made, ONE, FIRST))


# -- while a server runs ---------------------------------------------------------------------------------------------


def files(root: Path) -> int:
    return len(blob_files(root))


def headers(root: Path) -> dict[str, int]:
    """How many blobs each stored, by the headers on disk."""
    found: dict[str, int] = {}
    for path in (root / "blobs").rglob("*.safetensors"):
        line = peek(path.read_bytes()[:4096]).record.stored_by
        found[line] = found.get(line, 0) + 1
    return found


def test_two_engines_of_other_patch_releases_share_a_namespace_and_each_blob_says_whose_it_is(root: Path) -> None:
    """The good one hits what the bad one stored, and stores behind it: that goes, too, and nothing else."""
    with closing(SmallEngine.start(settings(root), "bad", stored_by=BAD)) as bad:
        bad.store(3)
        bad.wait_hits(3)
        with closing(SmallEngine.start(settings(root), "good", stored_by=GOOD)) as good:
            assert good.client.namespace == bad.client.namespace
            assert good.hits(3) == 3, "a patch release is no miss"
            good.store(5, start=3)
            good.store(4, first_token=100_000)
            good.wait_hits(5)
            good.wait_hits(4, first_token=100_000)
            wait_written(root)
            assert headers(root) == {BAD: 3, GOOD: 6}
            listed = report("ls", f"file://{root}", "--stored-by", "vllm==0.32.0")
            assert {chunk["stored_by"] for chunk in listed["chunks"]} <= {BAD}
            by_uri = report("evict", f"file://{root}", "--stored-by", "vllm<0.32.1", "--dry-run")
            assert by_uri["notes"] == [
                "the memory of this directory's server may hold more of it: say it with --server, too"
            ]
            done = report("evict", "--server", socket_of(root), "--stored-by", "vllm<0.32.1", "--yes")
            assert [(t["tier"], t["removed"], t["kept"]) for t in done["tiers"]] == [("host", 5, 0), ("disk", 5, 0)]
            assert headers(root) == {GOOD: 4}
            assert good.hits(5) == 0 and good.hits(4, first_token=100_000) == 4
            again = report("evict", "--server", socket_of(root), "--stored-by", "vllm<0.32.1", "--yes")
            assert [t["removed"] + t["kept"] for t in again["tiers"]] == [0, 0]
            good.store(3)
            good.wait_hits(3)
            wait_written(root)
            assert headers(root) == {GOOD: 7}, "computed anew, by the good one"
            assert report("evict", f"file://{root}", "--stored-by", "vllm<0.32.1", "--yes")["selected"] == 0


def test_what_is_in_use_stays_is_told_and_ends_with_4(root: Path) -> None:
    with closing(SmallEngine.start(settings(root), stored_by=BAD)) as engine:
        engine.store(3)
        engine.wait_hits(3)
        wait_written(root)
        lookup, answer = engine.look_up(2)
        assert answer.ready == 2
        done = run("evict", "--server", socket_of(root), "--stored-by", "vllm==0.32.0", "--yes", "--json")
        assert done.exit_code == 4, done.output
        assert json.loads(done.stdout)["tiers"][0]["kept"] == 2
        engine.client.release(lookup)


def test_a_restarted_server_knows_it_from_its_index_and_a_copy_through_a_server_keeps_it(
    root: Path, tmp_path: Path
) -> None:
    made = directory_tier(tmp_path / "source")
    with closing(SmallEngine.start(settings(root), stored_by=BAD)) as engine:
        engine.store(3)
        engine.wait_hits(3)
        wait_written(root)
    end_server(root)
    report("cp", f"file://{root}", made.uri, "--set", f"disk_bytes={1 << 30}")
    report("evict", f"file://{root}", "--all", "--yes")
    with closing(SmallEngine.start(settings(root), stored_by=GOOD)) as engine:
        report("warm", f"file://{root}", "--from", made.uri)
        assert engine.hits(3) == 3
        engine.store(5, start=3)
        engine.wait_hits(5)
        wait_written(root)
        assert headers(root) == {BAD: 3, GOOD: 2}, "the server sealed them anew, and not under the name of an engine"
    end_server(root)
    with closing(SmallEngine.start(settings(root), stored_by=GOOD)) as engine:
        assert report("ls", f"file://{root}")["namespaces"][0]["stored_by"] == {BAD: 3, GOOD: 2}
        done = report("evict", "--server", socket_of(root), "--stored-by", "tiered_kv<0.9.1", "--yes")
        assert done["tiers"][1]["removed"] == 5 and engine.hits(5) == 0
    end_server(root)


def test_a_server_without_a_disk_tier_knows_what_came_from_its_bucket(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    uri = f"shared+file://{tmp_path / 'bucket'}"
    config = Config.from_mapping({"storage_uri": uri, "host_bytes": "8MiB", "chunk_tokens": 64, "drain_s": 5.0})
    for who in (BAD, GOOD):
        engine = SmallEngine.start(config, stored_by=who)
        try:
            if who == BAD:
                engine.store(3)
                engine.wait_hits(3)
                wait_written(config.server_directory())
                continue
            engine.wait_hits(3)  # promoted
            done = report("evict", "--server", socket_of(config.server_directory()), "--stored-by", "vllm<0.32.1", "-y")
            assert [(t["tier"], t["removed"]) for t in done["tiers"]] == [("host", 3)]
            done = report("evict", uri, "--stored-by", "vllm<0.32.1", "--yes")
            assert [(t["tier"], t["removed"]) for t in done["tiers"]] == [("object", 3)]
            assert engine.hits(3) == 0
        finally:
            engine.close()
            end_server(config.server_directory())


@pytest.mark.parametrize("line", ["", "vllm", "tiered_kv/1 vllm/1 a b", "x" * 100_000])
def test_an_engine_that_does_not_say_who_it_is_is_refused(root: Path, line: str) -> None:
    with pytest.raises(Exception, match="a worker says who stores its chunks") as caught:
        SmallEngine.start(settings(root), stored_by=line)
    assert len(str(caught.value)) < 1000
