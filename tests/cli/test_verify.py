"""`tiered-kv verify`: everything that is bad is found, for the right reason, and nothing that is sound is touched."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kit.samples.formats import rehashed
from tests.kit.storage.places import Place, open_place, reasons
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.chunks.header import FIELDS, FORMAT, KEY, NAMESPACE, PEEK_BYTES, TABLE_OFFSET
from tiered_kv.cli.app import app
from tiered_kv.errors import TierUnavailable
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.blob_check import CORRUPT
from tiered_kv.ops.scrub import SILENT_MAX, Choice, scrub
from tiered_kv.ops.storage import Storage
from tiered_kv.tiers.disk.index import read_index
from tiered_kv.tiers.disk.tier import DiskTier

MODEL = Model(payload_bytes=8192)
OTHER = Model(weights="hf:fedcba9876543210fedcba9876543210fedcba98", payload_bytes=8192)
BLOB_BYTES = MODEL.form.blob_bytes

Damage = Callable[[bytes], bytes]


@pytest.fixture(params=["disk", "disk-without-index", "shared", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with open_place(request.param, tmp_path, request.getfixturevalue) as place:
        yield place


def under_name(blob: bytes, name: BlobName) -> bytes:
    """A sound blob whose header says another namespace, key and parent than it was sealed with."""
    data = bytearray(blob)
    for offset, value in ((113, name.namespace), (154, name.key), (198, name.parent)):
        data[offset : offset + 32] = value.hex().encode()
    return bytes(rehashed(data))


def lose_index(place: Place, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.id == "disk-without-index":
        assert place.directory is not None
        shutil.rmtree(place.directory / "index")


def flipped(offset: int, bit: int = 0) -> Damage:
    return lambda data: data[:offset] + bytes([data[offset] ^ 1 << bit]) + data[offset + 1 :]


def with_text(field_slice: slice, text: bytes) -> Damage:
    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[field_slice] = text
        return bytes(rehashed(changed))

    return damage


def damages() -> dict[str, tuple[Damage, str]]:
    """Every kind of damage to one blob, and the reason it is found for."""
    found: dict[str, tuple[Damage, str]] = {"length": (flipped(0, 4), "header"), "length's end": (flipped(7), "header")}
    for field in FIELDS:
        found[f"first digit of {field.name}"] = flipped(field.offset, 1), "header"
        found[f"last digit of {field.name}"] = flipped(field.offset + field.width - 1, 5), "header"
    for what, offset, reason in (
        ("text between the fields", 20, "header"),
        ("table", TABLE_OFFSET + 20, "header"),
        ("header's padding", PEEK_BYTES - 1, "header"),
        ("payload's start", PEEK_BYTES, "payload"),
        ("payload's middle", PEEK_BYTES + 4096, "payload"),
        ("payload's end", BLOB_BYTES - 1, "payload"),
    ):
        found[what] = flipped(offset, 3), reason
    for length in (0, 1, 100, PEEK_BYTES, PEEK_BYTES + 4096, BLOB_BYTES - 1):
        found[f"cut to {length}"] = (lambda data, length=length: data[:length]), "truncated"
    for more in (1, 4096, 100_000):
        found[f"{more} bytes more"] = (lambda data, more=more: data + bytes(more)), "longer"
    found["all zeros"] = (lambda data: bytes(len(data))), "header"
    found["another format version"] = with_text(FORMAT.slice, b"0004"), "version"
    found["a foreign namespace"] = with_text(NAMESPACE.slice, b"ab" * 16), "foreign"
    found["a rewritten key"] = with_text(KEY.slice, b"cd" * 16), "swapped"
    return found


DAMAGES = damages()


def stock(place: Place, count: int) -> list[str]:
    """One prompt of so many chunks, and another model's; returns the prompt's paths, in order."""
    with place.open() as storage:
        names = MODEL.store(storage, tokens(1, count))
        OTHER.store(storage, tokens(1, 2))
        return [storage.path(name) for name in names]


def ruin(place: Place, paths: list[str]) -> dict[str, str]:
    """Damage blobs in every way, each in one; returns the reasons by path."""
    expected = {}
    for path, (damage, reason) in zip(paths, DAMAGES.values(), strict=False):
        place.put(path, damage(place.get(path)))
        expected[path] = reason
    return expected


def test_every_damage_is_found_for_its_reason_and_repaired(place: Place, request: pytest.FixtureRequest) -> None:
    paths = stock(place, len(DAMAGES) + 6)
    expected = ruin(place, paths)
    first, second, third, fourth = paths[len(DAMAGES) : len(DAMAGES) + 4]
    one, two, copy = place.get(first), place.get(second), place.get(third)
    place.put(first, two)
    place.put(second, one)
    expected |= {first: "swapped", second: "swapped"}
    place.put(fourth, OTHER.blobs(tokens(1, 1))[0][1])
    expected[fourth] = "foreign"
    blobs = "blobs/" if place.is_disk else ""
    for stray in ("notes.txt", f"{MODEL.namespace.digest.hex()}/x.safetensors", f"{third.removeprefix(blobs)}.bak"):
        place.put(blobs + stray, copy)
        expected[blobs + stray] = "stray"
    lose_index(place, request)
    before = place.content()

    code, report = place.run("verify")
    assert (code, reasons(report)) == (4, expected)
    assert place.content() == before, "nothing is changed unasked"
    assert report["blobs"] == len(paths) + 2 and report["read"] == report["blobs"] and report["vanished"] == 0

    code, report = place.run("verify", "--repair", "--yes")
    left = {path: reason for path, reason in expected.items() if reason not in CORRUPT}
    assert (code, reasons(report)) == (4, left), "what may be somebody's data stays, and is told"
    assert report["removed"] == len(expected) - len(left)
    gone = {path for path, reason in expected.items() if reason in CORRUPT}
    assert place.content() == {path: data for path, data in before.items() if path not in gone}
    assert reasons(place.run("verify")[1]) == left
    for path in left:
        place.delete(path)
    assert place.run("verify", "--repair")[0] == 0, "with nothing corrupt there is nothing to confirm"
    if place.is_disk:
        assert_index_agrees(place)


def assert_index_agrees(place: Place) -> None:
    """Index, ls and files name the same blobs."""
    assert place.directory is not None
    keys = {path.stem for path in (place.directory / "blobs").rglob("*.safetensors")}
    assert {key.hex() for shard in read_index(place.directory).values() for key in shard.rows()} == keys
    with place.open() as storage:
        assert {blob.name.key.hex() for blob in storage.look().blobs} == keys
    tier = DiskTier(place.directory, 1 << 30, min_free_bytes=0)
    assert {info.name.key.hex() for info in tier.scan()} == keys
    tier.close()


def test_only_corrupt_blobs_are_repaired_to_a_clean_end(local_place: Place) -> None:
    place = local_place
    paths = stock(place, 4)
    place.put(paths[2], flipped(PEEK_BYTES)(place.get(paths[2])))
    place.put(paths[3], place.get(paths[3])[:-1])
    code, report = place.run("verify", "--repair", "--yes")
    assert (code, report["removed"], reasons(report)) == (0, 2, {})
    assert [bad["reason"] for bad in report["bad"]] == ["payload", "truncated"]
    code, report = place.run("verify")
    assert (code, report["bad"], report["read"]) == (0, [], 4)


def test_an_object_whose_name_lies_about_its_place_is_found(tmp_path: Path) -> None:
    place = Place.shared(tmp_path / "bucket")
    paths = stock(place, 3)
    second = Path(paths[1])
    key, depth, parent = second.name.split(".")[:3]
    lies = {
        str(second.with_name(f"{key}.0000005.{parent}.safetensors")): "misplaced",
        str(second.with_name(f"{key}.{depth}.{'ab' * 16}.safetensors")): "misplaced",
    }
    for lie in lies:
        place.put(lie, place.get(paths[1]))
    assert reasons(place.run("verify")[1]) == lies
    assert place.run("verify", "--repair", "--yes")[0] == 0
    assert {path for path in place.paths() if path.endswith(".safetensors")} >= {*paths}
    assert not place.paths() & set(lies)


def test_a_record_that_is_missing_or_wrong_is_found(place: Place) -> None:
    stock(place, 2)
    with place.open() as storage:
        mine, other = (storage.record_path(model.namespace.digest) for model in (MODEL, OTHER))
    record = place.get(mine)
    wrong = [place.get(other), b"[" * 3_000_000, b"", b"{}", b"nonsense", record[:-9]]
    for damage in wrong if place.directory is not None else wrong[1:2]:
        place.put(mine, damage)
        code, report = place.run("verify")
        assert (code, reasons(report)) == (4, {mine: "record"}), damage[:20]
    place.delete(mine)
    assert reasons(place.run("verify")[1]) == {mine: "record"}
    assert reasons(place.run("verify", "--repair", "--yes")[1]) == {mine: "record"}
    with place.open() as storage:
        storage.write_record(MODEL.namespace)
    assert place.run("verify")[0] == 0


def test_a_self_test_needs_no_record(local_place: Place) -> None:
    place = local_place
    form = Model().form
    with place.open() as storage:
        name = BlobName(SELF_TEST_NAMESPACE, bytes(16), SELF_TEST_NAMESPACE, 0)
        data = bytearray(Model().blobs(tokens(1, 1))[0][1])
        data[NAMESPACE.slice] = SELF_TEST_NAMESPACE.hex().encode()
        data[KEY.slice] = bytes(16).hex().encode()
        data[198 : 198 + 32] = SELF_TEST_NAMESPACE.hex().encode()
        storage.write(name, memoryview(rehashed(data)))
    code, report = place.run("verify")
    assert (code, report["bad"], report["read_bytes"]) == (0, [], form.blob_bytes)


def test_a_blob_of_another_shape_is_found(local_place: Place) -> None:
    """By the record, which says how many tokens a chunk has, or by the namespace's other blobs."""
    place = local_place
    paths = stock(place, 5)
    wide = Model(payload_bytes=12288)
    name = MODEL.names(tokens(1, 5))[4]
    place.put(paths[4], under_name(wide.blobs(tokens(1, 5))[4][1], name))
    few = bytearray(place.get(paths[3]))
    few[274:284] = b"0000000016"
    place.put(paths[3], bytes(rehashed(few)))
    assert reasons(place.run("verify")[1]) == {paths[3]: "misfit", paths[4]: "misfit"}
    code, report = place.run("verify", "--repair", "--yes")
    assert (code, report["removed"]) == (0, 2)


def test_the_record_decides_against_all_blobs(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    (path,) = stock(place, 1)
    few = bytearray(place.get(path))
    few[274:284] = b"0000000016"
    place.put(path, bytes(rehashed(few)))
    code, report = place.run("verify")
    assert (code, reasons(report)) == (4, {path: "misfit"})
    assert report["bad"][0]["detail"] == "another number of tokens. expected=32 observed=16"


def test_a_record_that_was_written_since_the_listing_is_not_missing(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    stock(place, 1)
    with place.open() as storage:
        record = tmp_path / storage.record_path(MODEL.namespace.digest)
        data = record.read_bytes()
        record.unlink()
        content = storage.look()
        assert [bad.reason for bad in scrub(storage, content, Choice()).bad] == ["record"]
        record.write_bytes(data)
        assert scrub(storage, content, Choice()).bad == []


def test_without_a_majority_nobody_says_which_shape_is_right(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    paths = stock(place, 2)
    wide = Model(payload_bytes=12288)
    name = MODEL.names(tokens(1, 2))[1]
    place.put(paths[1], under_name(wide.blobs(tokens(1, 2))[1][1], name))
    before = place.content()
    code, report = place.run("verify", "--repair", "--yes")
    assert (code, reasons(report)) == (4, {paths[0]: "misfit", paths[1]: "misfit"})
    assert place.content() == before


def test_a_file_that_grew_by_a_hole_of_gigabytes_is_longer(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    paths = stock(place, 3)
    os.truncate(tmp_path / paths[1], 40 << 30)
    code, report = place.run("verify")
    assert (code, reasons(report)) == (4, {paths[1]: "longer"})
    assert report["read_bytes"] < 1 << 20


def test_a_sample_is_a_share_chosen_by_the_seed(tmp_path: Path) -> None:
    place = Place.shared(tmp_path / "bucket")
    paths = stock(place, 58)
    for path in paths:
        place.put(path, place.get(path)[:-1])
    seen = []
    for seed in (1, 1, 2):
        code, report = place.run("verify", "--sample", "5%", "--seed", seed)
        assert (report["blobs"], report["read"], report["share"], report["seed"]) == (60, 3, 0.05, seed)
        seen.append(set(reasons(report)))
        assert code == (4 if seen[-1] else 0)
    assert seen[0] == seen[1] != seen[2]
    reports = [place.run("verify", "--sample", "1.5%")[1] for _ in range(2)]
    assert [report["read"] for report in reports] == [1, 1] and reports[0]["seed"] != reports[1]["seed"]


def test_one_namespace_is_checked_alone(local_place: Place) -> None:
    place = local_place
    paths = stock(place, 3)
    place.put(paths[1], place.get(paths[1])[:-1])
    blobs = "blobs/" if place.is_disk else ""
    place.put(f"{blobs}stray", b"x")
    code, report = place.run("verify", "--namespace", OTHER.namespace.digest.hex()[:8])
    assert (code, report["read"], report["namespace"]) == (0, 2, OTHER.namespace.digest.hex())
    code, report = place.run("verify", "--namespace", MODEL.namespace.digest.hex())
    assert (code, reasons(report)) == (4, {paths[1]: "truncated"})


def test_nothing_is_removed_unconfirmed(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    paths = stock(place, 3)
    place.put(paths[1], place.get(paths[1])[:-1])
    before = place.content()
    code, report = place.run("verify", "--repair")
    assert (code, report["removed"], reasons(report)) == (5, 0, {paths[1]: "truncated"}), "to read it all takes hours"
    with open(tmp_path / "server.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, report = place.run("verify", "--repair", "--yes")
    assert (code, report["removed"], reasons(report)) == (3, 0, {paths[1]: "truncated"})
    assert place.content() == before


def test_what_was_read_is_told_where_ctrl_c_answers_the_question(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    paths = stock(place, 3)
    place.put(paths[1], place.get(paths[1])[:-1])
    words = [sys.executable, "-m", "tiered_kv.cli", "verify", f"file://{tmp_path}", "--repair", "--json"]
    person, terminal = pty.openpty()
    with (
        open(person, "rb"),
        open(terminal, "rb") as stdin,
        subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command,
    ):
        assert command.stderr is not None
        said = b""
        while b"[y/N] " not in said:
            more = os.read(command.stderr.fileno(), 4096)
            assert more, said
            said += more
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=60)
    assert (command.returncode, reasons(json.loads(out))) == (130, {paths[1]: "truncated"})


def test_a_repair_that_cannot_open_the_directory_is_no_success(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    stock(place, 1)
    (tmp_path / "server.lock").unlink()
    (tmp_path / "server.lock").mkdir()
    code, report = place.run("verify", "--repair", "--yes")
    assert code == 1 and "server.lock" in report["notes"][0] and report["bad"] == []
    assert place.run("verify")[0] == 0


@pytest.mark.parametrize("sample", ["0%", "5", "101%", "-1%", "x%", ""])
def test_a_wrong_share_says_what_is_expected(tmp_path: Path, sample: str) -> None:
    result = CliRunner().invoke(app, ["verify", f"file://{tmp_path}", "--sample", sample])
    assert result.exit_code == 2 and "expected a share such as 5%" in result.stderr


def test_an_empty_directory_is_sound(tmp_path: Path) -> None:
    code, report = Place.disk(tmp_path).run("verify")
    assert (code, report["blobs"], report["bad"]) == (0, 0, [])
    assert os.listdir(tmp_path) == []


def test_people_read_reasons_counts_and_a_rate(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    paths = stock(place, 4)
    place.put(paths[1], place.get(paths[1])[:-1])
    (tmp_path / paths[2]).unlink()
    result = CliRunner().invoke(app, ["verify", place.uri, "--repair", "--yes"])
    assert result.exit_code == 0
    for text in (
        f"truncated  {paths[1]}",
        "1 truncated: the end is missing",
        "1 sound blob, 12 KiB, lies behind a gap or a bad one; `tiered-kv gc` removes what is behind a gap",
        "read 5 of 5 blobs, 60 KiB in ",
        "/s): 1 bad",
        "removed 1 corrupt blob, 12 KiB",
    ):
        assert text in result.stdout, result.stdout


# -- what happens while it reads --------------------------------------------------------------------------------------


def with_reads(storage: Storage, read: Callable[..., bytes | None]) -> Storage:
    """The storage, but reading is ours."""
    storage.read = read  # type: ignore[method-assign]
    return storage


def test_a_blob_that_vanishes_is_not_bad_and_one_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    stock(place, 6)
    names = MODEL.names(tokens(1, 6))
    torn: set[bytes] = set()
    with place.open() as storage:
        content, honest = storage.look(), storage.read

        def read(name, length=None):
            data = honest(name, length)
            if name == names[1]:
                return None
            if name == names[2] and length != 1 << 20 and name.key not in torn:
                torn.add(name.key)
                return data[:-1]
            return data

        found = scrub(with_reads(storage, read), content, Choice())
    assert torn and (found.bad, found.vanished, found.read, found.held) == ([], 1, 7, 8)


def test_what_the_medium_does_not_give_is_bad_and_stays(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    paths = stock(place, 3)
    with place.open() as storage:
        content, honest = storage.look(), storage.read

        def read(name, length=None):
            if name == MODEL.names(tokens(1, 3))[1]:
                raise TierUnavailable("no luck") from OSError(5, "Input/output error")
            return honest(name, length)

        (bad,) = scrub(with_reads(storage, read), content, Choice()).bad
    assert (bad.path, bad.reason, bad.detail, bad.is_corrupt) == (paths[1], "unreadable", "Input/output error", False)


def test_a_store_that_stops_to_answer_is_not_a_store_of_bad_blobs(tmp_path: Path) -> None:
    place = Place.shared(tmp_path / "bucket")
    stock(place, SILENT_MAX + 10)

    def read(name, length=None):
        raise TierUnavailable("the connection was refused")

    with place.open() as storage:
        content = storage.look()
        with pytest.raises(TierUnavailable, match="refused"):
            scrub(with_reads(storage, read), content, Choice())
        content.blobs = content.blobs[:3]
        with pytest.raises(TierUnavailable, match="refused"):
            scrub(storage, content, Choice())


def test_chunks_behind_a_gap_are_told_and_no_fault(local_place: Place) -> None:
    place = local_place
    paths = stock(place, 4)
    place.delete(paths[1])
    code, report = place.run("verify")
    assert (code, report["bad"], report["unreachable"]) == (0, [], 2)
    assert report["unreachable_bytes"] >= 2 * BLOB_BYTES and CHUNK
