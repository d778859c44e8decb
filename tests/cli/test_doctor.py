"""`tiered-kv doctor` on directories and on the real S3 server: what works, what would not, and that nothing is left."""

import json
import mmap
import os
import socket
import stat
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.kit.ports import free_port
from tests.kit.s3 import S3
from tests.kit.server import object_nodes
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import wait_written
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tests.kit.stores.mooncake import Pool
from tests.kit.stores.session import ATOMIC, OVERWRITING, Stores
from tests.kit.stores.store import Store
from tiered_kv.cli.app import app
from tiered_kv.cli.doctor import DoctorReport
from tiered_kv.config import Config
from tiered_kv.fleet.layout import MemberReport, Term, lease_path
from tiered_kv.fleet.recency import BASE_MAGIC, LOG_MAGIC
from tiered_kv.ops import doctor_object
from tiered_kv.ops.doctor_server import SHARED_MEMORY, left_regions
from tiered_kv.ops.object_storage import ObjectStorage
from tiered_kv.ops.open import open_storage
from tiered_kv.server.directory import ServerInfo, read_info
from tiered_kv.server.door import DoorProcess
from tiered_kv.tiers.disk.lock import DirectoryLock
from tiered_kv.tiers.disk.marker import claim
from tiered_kv.tiers.object.store import ObjectStore

SMALL = ("--set", "host_bytes=64MiB", "--set", "disk_bytes=160MiB")

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def doctor() -> Doctor:
    """Run the verb; its exit code and its verdict agree, and the table says what the JSON says."""

    def run(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
        assert result.exit_code in (0, 4), (result.stderr, result.exception)
        msgspec.json.decode(result.stdout, type=DoctorReport)
        report: dict[str, Any] = json.loads(result.stdout)
        counts = {status: sum(f["status"] == status for f in report["findings"]) for status in ("error", "warning")}
        assert counts == {"error": report["errors"], "warning": report["warnings"]}
        assert report["works"] is (report["errors"] == 0) is (result.exit_code == 0)
        assert all(f["hint"] for f in report["findings"] if f["status"] == "error"), "every error says what to do"
        return report

    return run


def found(report: dict[str, Any], check: str, status: str) -> str:
    """Text and hint of the one finding of a check that has this status."""
    (one,) = [f for f in report["findings"] if (f["check"], f["status"]) == (check, status)]
    return f"{one['text']} - {one['hint']}"


def errors(report: dict[str, Any]) -> list[str]:
    return [f["check"] for f in report["findings"] if f["status"] == "error"]


def tree(directory: Path) -> dict[str, object]:
    """Everything below a directory, with modes and contents, but what SQLite keeps beside a database that is read."""
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(directory.rglob("*"))
        if not path.name.endswith(("-shm", "-wal"))
    }


# -- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_not_there_works_and_is_not_made(doctor: Doctor, tmp_path: Path) -> None:
    report = doctor(f"file://{tmp_path}/some/where", *SMALL)
    assert errors(report) == []
    assert report["plan"] == f"host 64 MiB -> disk 160 MiB at {tmp_path}/some/where"
    assert "will be made" in found(report, "directory", "ok")
    assert "written, read, compared and removed" in found(report, "disk test", "ok")
    assert [(m["tier"], m["operation"]) for m in report["measurements"]] == [("disk", "write"), ("disk", "read")]
    assert all(m["bytes"] > 4 << 20 and m["bytes_per_s"] > 0 < m["seconds"] for m in report["measurements"])
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_models_in_it_is_left_as_it_is(doctor: Doctor, root: Path) -> None:
    root.mkdir(0o700)
    with open_storage(f"file://{root}") as storage:
        Model().store(storage, tokens(1, 6))
        Model(weights="other").store(storage, tokens(1, 2))
    before = tree(root)
    report = doctor(f"file://{root}", *SMALL, "--set", f"chunk_tokens={CHUNK}")
    assert tree(root) == before
    assert errors(report) == []
    texts = [f["text"] for f in report["findings"] if f["check"] == "disk content"]
    assert texts[0] == "2 namespaces, 8 chunks, 64 KiB"
    assert f"{Model().namespace.digest.hex()}: 6 chunks, 48 KiB, weights hf:" in texts[1]
    chunks = [f["text"] for f in report["findings"] if f["check"] == "chunks"]
    assert len(chunks) == 2
    fit, share = (64 << 20) // 8192, int((64 << 20) * 0.375) // 8192
    assert f"host {fit}, disk {(96 << 20) // 8192}; one request may load {share * CHUNK} tokens" in chunks[0]
    shown = CliRunner().invoke(app, ["doctor", f"file://{root}", *SMALL]).stdout
    assert shown.startswith(f"host 64 MiB -> disk 160 MiB at {root}\n") and "It would work" in shown
    assert all(text in shown for text in texts)


def test_a_disk_that_holds_no_chunk_would_not_work_whatever_else_there_is_to_say(doctor: Doctor, root: Path) -> None:
    told = ("--chunk-bytes", "100MiB", "--max-model-len", "131072")
    for host in ("512MiB", "4GiB"):
        report = doctor(f"file://{root}", "--set", f"host_bytes={host}", "--set", "disk_bytes=160MiB", *told)
        assert "the disk tier cannot hold one" in found(report, "chunks", "error")


def test_chunks_of_another_size_are_named(doctor: Doctor, root: Path) -> None:
    root.mkdir(0o700)
    with open_storage(f"file://{root}") as storage:
        Model().store(storage, tokens(1, 2))
    text = found(doctor(f"file://{root}", *SMALL), "disk content", "warning")
    assert "another chunk_tokens than 256" in text and f"set chunk_tokens to {CHUNK}" in text


def test_chunks_of_an_earlier_format_are_no_strays(doctor: Doctor, tmp_path: Path, repository: Path) -> None:
    with tarfile.open(repository / "tests" / "golden" / "cache_v2.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    report = doctor(f"file://{tmp_path}/cache", *SMALL)
    assert "6 chunks of another format version or namespace" in found(report, "disk content", "ok")
    assert "no sound blobs of ours" not in json.dumps(report)


def test_rows_of_vllms_offloading_are_of_no_chunk_tokens(doctor: Doctor, root: Path) -> None:
    root.mkdir(0o700)
    with open_storage(f"file://{root}") as storage:
        Model(fields={"rows": {}}).store(storage, tokens(1, 2))
    tier = {"type": "TieredKVTier", "module_path": "tiered_kv.vllm.offloading", "storage_uri": f"file://{root}"}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": [tier]}
    whole = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    for arguments in ((f"file://{root}",), ("--config", json.dumps(whole))):
        report = doctor(*arguments, *SMALL)
        assert "chunk_tokens than" not in json.dumps(report)
        assert f"rows of vLLM's offloading of {CHUNK} tokens" in json.dumps(report)
    assert "a row of 32 tokens takes 8 KiB" in found(report, "chunks", "ok")
    told = ("--chunk-bytes", "1MiB", "--max-model-len", "131072")
    text = found(doctor("--config", json.dumps(whole), *SMALL, *told), "chunks", "ok")
    assert "a row takes 1 MiB" in text and "one request may load" not in text, "rows come a few at a time"
    with open_storage(f"file://{root}") as storage:
        Model(weights="ours").store(storage, tokens(1, 2))
    text = found(doctor(f"file://{root}", *SMALL), "disk content", "warning")
    assert "what is no row of vLLM's offloading was stored with another chunk_tokens than 256" in text


def test_the_longest_prompt_must_fit_into_one_request(doctor: Doctor, root: Path) -> None:
    root.mkdir(0o700)
    with open_storage(f"file://{root}") as storage:
        Model(payload_bytes=1 << 20).store(storage, tokens(1, 2))
    text = found(doctor(f"file://{root}", *SMALL), "chunks", "warning")
    assert "may load 736 tokens of max_model_len 4096" in text
    needed = text.partition("set host_bytes to ")[2].split()[0]
    assert needed == "343MiB"
    enough = ("--set", f"host_bytes={needed}", "--set", "disk_bytes=160MiB")
    assert "may load 4096 tokens" in found(doctor(f"file://{root}", *enough), "chunks", "ok")
    told = ("--chunk-bytes", "8MiB", "--max-model-len", "4096")
    assert "may load 768 tokens of max_model_len 4096" in found(
        doctor(f"file://{root}", *SMALL, *told), "chunks", "warning"
    )
    assert "cannot hold one" in found(doctor(f"file://{root}", *SMALL, "--chunk-bytes", "1GiB"), "chunks", "error")


def test_a_path_below_a_file_would_not_work(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place, text in ((tmp_path / "file", "a file in its place"), (tmp_path / "file" / "cache", "")):
        report = doctor(f"file://{place}", *SMALL)
        assert errors(report) == ["directory"]
        assert text in found(report, "directory", "error")
        assert report["measurements"] == []
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_place_that_cannot_be_written_would_not_work(doctor: Doctor) -> None:
    report = doctor("file:///proc/tiered_kv/cache", *SMALL)  # root may do everything elsewhere
    assert set(errors(report)) <= {"directory", "room", "disk test"} and not report["works"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("is_made", [True, False])
def test_a_directory_of_another_user_would_not_work(doctor: Doctor, root: Path, *, is_made: bool) -> None:
    """Below a directory that only root may enter, and as nobody: every system call may be refused."""
    root.parent.chmod(0o700)
    if is_made:
        root.mkdir(0o700)
    os.seteuid(65534)
    try:
        report = doctor(f"file://{root}", "--set", "host_bytes=64MiB")
    finally:
        os.seteuid(0)
    assert "directory" in errors(report)
    assert report["plan"] == f"host 64 MiB -> disk at {root}"


@pytest.mark.parametrize(
    ("settings", "check", "status", "text"),
    [
        (["disk_bytes=1MiB"], "room", "error", "too little for any blob"),
        (["disk_bytes=1GiB", "min_free_bytes=1PiB"], "settings", "error", "min_free_bytes"),
        (["disk_bytes=1GiB", "min_free_bytes=1000TiB"], "room", "error", "nothing would ever be stored"),
        (["disk_bytes=1000TiB"], "room", "warning", "the limit can never be reached"),
        (["host_bytes=1000TiB"], "memory", "error", "the server would not start"),
        (["server=unix:///nowhere/at/all.sock"], "server", "error", "no server answers"),
        (["disk_bytes=160MiB", "drain_s=-1"], "settings", "error", "got -1"),
    ],
)
def test_sizes_that_do_not_fit(
    doctor: Doctor, root: Path, settings: list[str], check: str, status: str, text: str
) -> None:
    report = doctor(f"file://{root}", *(word for one in settings for word in ("--set", one)))
    assert text in found(report, check, status)
    assert report["works"] is (status != "error")
    assert not root.exists()


def test_a_full_disk_with_a_stock_still_serves_it(doctor: Doctor, root: Path) -> None:
    root.mkdir(0o700)
    with open_storage(f"file://{root}") as storage:
        Model().store(storage, tokens(1, 2))
    before = tree(root)
    report = doctor(f"file://{root}", *SMALL, "--set", "min_free_bytes=1000TiB")
    assert report["works"] and "nothing new is stored" in found(report, "room", "warning")
    assert tree(root) == before


def test_more_than_the_limit_is_said(doctor: Doctor, root: Path) -> None:
    root.mkdir(0o700)
    with open_storage(f"file://{root}") as storage:
        Model(payload_bytes=40 << 20).store(storage, tokens(1, 2))
    text = found(doctor(f"file://{root}", *SMALL[:2], "--set", "disk_bytes=66MiB"), "room", "warning")
    assert "more than the limit" in text


def test_owner_mode_and_strays(doctor: Doctor, root: Path) -> None:
    root.mkdir()
    claim(root)
    root.chmod(0o777)
    (root / "blobs").mkdir()
    (root / "blobs" / "stray").write_text("x")
    report = doctor(f"file://{root}", *SMALL)
    warnings = [f["text"] for f in report["findings"] if f["check"] == "directory" and f["status"] == "warning"]
    assert "one file in it is no sound blob of ours" in warnings
    assert any("`tiered-kv verify` names them" in f["hint"] for f in report["findings"])
    assert "others may write into it (mode 0777)" in warnings
    if os.geteuid() == 0:
        os.chown(root, 65534, 65534)
        report = doctor(f"file://{root}", *SMALL)
        assert any("belongs to uid 65534" in f["text"] for f in report["findings"] if f["status"] == "warning")
        os.chown(root, 0, 0)


def test_a_directory_on_a_network_mount_is_named(doctor: Doctor, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(0o700)
    monkeypatch.setattr("tiered_kv.ops.doctor_disk.is_on_network", lambda _path, _mounts: True)
    assert "shared+file://" in found(doctor(f"file://{root}", *SMALL), "directory", "warning")


def test_without_direct_io_it_works_with_a_warning(doctor: Doctor, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.supports_direct_io", lambda _path: False)
    report = doctor(f"file://{root}", *SMALL)
    assert report["works"] and "page cache" in found(report, "O_DIRECT", "warning")


def test_the_socket_needs_a_private_place(
    doctor: Doctor, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmp_path / f"tiered_kv-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tiered_kv.server.directory.SOCKET_PATH_MAX", 300)
    report = doctor(f"file://{root}", *SMALL)
    assert "must belong to this user alone (mode 0700)" in found(report, "socket", "error")
    assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o755 and list(open_to_all.iterdir()) == []


# -- beside others ----------------------------------------------------------------------------------------------------


def test_a_locked_directory_is_not_written_into(doctor: Doctor, root: Path) -> None:
    root.mkdir(0o700)
    claim(root)
    lock = DirectoryLock(root)
    before = tree(root)
    report = doctor(f"file://{root}", *SMALL)
    assert "another command" in found(report, "server", "warning")
    assert "left out" in found(report, "disk test", "warning")
    info = ServerInfo("/nowhere", 1, "9", 1, "", "")
    (root / "server.json").write_bytes(msgspec.json.encode(info))
    hung = doctor(f"file://{root}", *SMALL)
    assert "pid 1, version 9) does not answer" in found(hung, "server", "error")
    (root / "server.json").unlink()
    assert tree(root) == before
    lock.release()
    assert "none runs" in found(doctor(f"file://{root}", *SMALL), "server", "ok")


def test_beside_a_server_with_the_same_limits_and_with_others(doctor: Doctor, root: Path) -> None:
    engine = SmallEngine.start(settings(root))
    try:
        engine.store(6)
        engine.wait_hits(6)
        wait_written(root)
        same = ("--set", "host_bytes=8MiB", "--set", "disk_bytes=160MiB", "--set", "chunk_tokens=64")
        report = doctor(f"file://{root}", *same)
        info = read_info(root)
        assert info is not None
        assert f"one runs (pid {info.pid}, version {info.version}, " in found(report, "server", "ok")
        assert "the running server uses it (6 blobs" in found(report, "disk test", "ok")
        assert report["works"] and report["measurements"] == []
        assert "6 chunks" in report["findings"][[f["check"] for f in report["findings"]].index("disk content")]["text"]

        text = found(doctor(f"file://{root}", *same[:2]), "room", "ok")
        assert "disk_bytes 160 MiB" in text, "what the server has, as none is named"

        other = doctor(f"file://{root}", "--set", "host_bytes=16MiB", "--set", "disk_bytes=160MiB")
        text = found(other, "server", "error")
        assert f"host_bytes={8 << 20}" in text and f"host_bytes={16 << 20}" in text and str(info.pid) in text
        assert other["measurements"] == []
        named = doctor(f"file://{root}", *same, "--set", f"server=unix://{info.socket}")
        assert "one runs" in found(named, "server", "ok")
        elsewhere = doctor(f"file://{root}-2", *same, "--set", f"server=unix://{info.socket}")
        assert "serves another directory" in found(elsewhere, "server", "error")
        assert not [path for path in root.iterdir() if path.name.startswith("doctor")]
        assert engine.hits(6) == 6
    finally:
        engine.close()


# -- object stores ----------------------------------------------------------------------------------------------------


def reached(s3: S3, **changes: str) -> tuple[str, str]:
    return "--set", f"storage_options={json.dumps({**s3.options(), **changes})}"


def test_a_bucket_with_limits_and_a_disk_in_front(doctor: Doctor, s3: S3, tmp_path: Path) -> None:
    uri = s3.uri(prefix := s3.new_prefix())
    with open_storage(uri, {"storage_options": s3.options()}) as storage:
        Model().store(storage, tokens(1, 3))
    before = sorted(s3.paths(prefix))
    more = ("storage_bytes=2TiB", "storage_ttl=7d", f"disk_path={tmp_path}/disk", f"chunk_tokens={CHUNK}")
    report = doctor(uri, *SMALL, *reached(s3), *(word for one in more for word in ("--set", one)))
    assert errors(report) == []
    assert report["plan"] == (
        f"host 64 MiB -> disk 160 MiB at {tmp_path}/disk -> {uri} (limit 2 TiB, unused for 7 d goes)"
    )
    assert "refuses to overwrite" in found(report, "conditional writes", "ok")
    assert "plain HTTP, on this machine" in found(report, "endpoint", "ok")
    assert "can read them there" in found(report, "credentials", "warning")
    assert "agrees with ours" in found(report, "clock", "ok")
    assert "median of 5" in found(report, "round trip", "ok")
    assert [(m["tier"], m["operation"]) for m in report["measurements"]] == [
        ("disk", "write"), ("disk", "read"), ("object", "head"), ("object", "write"), ("object", "read")
    ]  # fmt: skip
    texts = [f["text"] for f in report["findings"] if f["check"] == "object content"]
    assert texts[0] == "1 namespace, 3 chunks, 24 KiB"
    assert sorted(s3.paths(prefix)) == before
    assert not (tmp_path / "disk").exists()


def test_beside_a_running_node_with_a_bucket(doctor: Doctor, s3: S3, root: Path) -> None:
    where = object_nodes.s3_place(s3, s3.new_prefix())
    given = where.settings(root, storage_bytes="1GiB")
    with object_nodes.node(given) as cache:
        assert object_nodes.store(cache, 1, 4) == 4
        object_nodes.wait_uploaded(root)
        report = doctor("--config", json.dumps(given))
        other = doctor("--config", json.dumps(given | {"storage_uri": f"{where.uri}-2"}))
        assert object_nodes.load(cache, 1, 4) == 4
    assert errors(report) == []
    assert "the running server uses it (4 blobs" in found(report, "disk test", "ok")
    assert {m["tier"] for m in report["measurements"]} == {"object"}
    content = [f["text"] for f in report["findings"] if f["check"] == "object content"]
    assert content[0].startswith("1 namespace, 4 chunks")
    assert not [f for f in report["findings"] if f["check"] == "limits"]
    assert "keeps it in front of" in found(other, "server", "error")


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("changes", "bucket", "text"),
    [
        ({"secret": "hidden-secret-of-somebody"}, None, "the secret does not fit the key"),
        ({"key": "nobody"}, None, "it does not know the access key"),
        ({}, "no-such-bucket-here", "there is no bucket 'no-such-bucket-here'"),
        ({"endpoint_url": "http://127.0.0.1:PORT"}, None, "the connection was refused"),
    ],
)
def test_a_store_that_cannot_be_used(s3: S3, changes: dict[str, str], bucket: str | None, text: str) -> None:
    options = {name: value.replace("PORT", str(unused_port())) for name, value in changes.items()}
    uri = f"s3://{bucket}/p" if bucket else s3.uri(s3.new_prefix())
    for more in ((), ("--json",)):
        result = CliRunner().invoke(app, ["doctor", uri, *SMALL[:2], *reached(s3, **options), *more])
        assert result.exit_code == 4, (result.stdout, result.stderr)
        assert (text in result.stdout and "It would not work" in result.stdout) or more
        assert s3.secret_key not in result.output and "hidden-secret" not in result.output


def test_limits_of_other_servers_are_compared(doctor: Doctor, s3: S3) -> None:
    uri = s3.uri(s3.new_prefix())
    with open_storage(uri, {"storage_options": s3.options()}) as storage:
        assert isinstance(storage, ObjectStorage)
        term = Term("other", 1, capacity_bytes=1 << 40)
        storage.store.put(lease_path(3), msgspec.json.encode(term))
    report = doctor(uri, *SMALL[:2], *reached(s3), "--set", "storage_bytes=2TiB")
    assert "storage_bytes 1 TiB; here it is 2 TiB" in found(report, "limits", "warning")
    assert not [f for f in doctor(uri, *SMALL[:2], *reached(s3), "--set", "storage_bytes=1TiB")["findings"]
                if f["check"] == "limits"]  # fmt: skip


def test_what_is_not_ours_below_our_prefix_is_named(doctor: Doctor, s3: S3) -> None:
    uri = s3.uri(s3.new_prefix())
    foreign = ["lease/notes.txt", f"lease/{7:020d}", "recency/base/1-0-0", "recency/one/4", "servers/one.3", "usage"]
    with open_storage(uri, {"storage_options": s3.options()}) as storage:
        assert isinstance(storage, ObjectStorage)
        ours = {
            lease_path(3): msgspec.json.encode(Term("other", 1)),
            "_tiered_kv/servers/one.1": msgspec.json.encode(MemberReport(1, 3)),
            "_tiered_kv/recency/one/3": LOG_MAGIC + bytes(16),
            "_tiered_kv/recency/base/3-0-0": BASE_MAGIC,
            f"_tiered_kv/epochs/{'0' * 32}/17": b"",
            f"_tiered_kv/pins/{'0' * 32}/{'1' * 32}.000000000000": b"",
            "_tiered_kv/peers/10.0.0.7:7460": b"",
        }
        for path, data in ours.items():
            storage.store.put(path, data)
        assert not [f for f in doctor(uri, *SMALL[:2], *reached(s3))["findings"] if f["check"] == "foreign objects"]
        for path in foreign:
            storage.store.put(f"_tiered_kv/{path}", b"somebody's notes")
        report = doctor(uri, *SMALL[:2], *reached(s3))
        text = found(report, "foreign objects", "warning")
        assert text.startswith("6 objects below _tiered_kv/ are none of ours: _tiered_kv/lease/00")
        assert "_tiered_kv/lease/notes.txt, " in text and " and 3 more - servers leave them alone" in text
        assert report["works"]
        assert all(storage.store.get(f"_tiered_kv/{path}") == b"somebody's notes" for path in foreign)


def test_a_store_without_conditional_writes(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "creates_atomically", lambda _self: False)
    uri, limit = f"shared+file://{tmp_path}/shared", ("--set", "storage_bytes=1GiB")
    assert "cannot be kept" in found(doctor(uri, *SMALL[:2], *limit), "conditional writes", "error")
    promised = doctor(uri, *SMALL[:2], *limit, "--set", "single_writer=true")
    assert promised["works"] and "where two servers meet" in found(promised, "conditional writes", "warning")
    assert doctor(uri, *SMALL[:2])["works"]


def served_arguments(served: Store) -> tuple[str, ...]:
    return (served.uri(served.new_prefix()), *SMALL[:2], "--set", f"storage_options={json.dumps(served.options())}")


BLOB_HTTP = "AccountName=a;AccountKey=hidden==;BlobEndpoint=http://10.0.0.7:10000/a"


@pytest.mark.parametrize(
    ("uri", "options", "environment", "credentials", "endpoint"),
    [
        ("gs://b", {}, {}, "none named: from gcloud's login", "Google Cloud Storage, encrypted"),
        ("gs://b", {"token": "/f"}, {}, "from token of storage_options", "Google Cloud Storage, encrypted"),
        ("gs://b", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "/hidden"}, "that GOOGLE_APPLICATION_CREDENTIALS", "Google"),
        (
            "gs://b?token=anon",
            {},
            {"STORAGE_EMULATOR_HOST": "10.0.0.7:1"},
            "none: the option token",
            "plain HTTP to an",
        ),
        ("az://c", {"account_name": "a"}, {}, "none named: from a managed identity", "Azure Blob Storage, encrypted"),
        ("az://c", {"account_name": "a", "sas_token": "hidden"}, {}, "from sas_token of storage_options", "Azure Blob"),
        ("az://c", {}, {"AZURE_STORAGE_ACCOUNT_KEY": "hidden"}, "from AZURE_STORAGE_ACCOUNT_KEY in the", "Azure Blob"),
        ("az://c", {"connection_string": BLOB_HTTP}, {}, "from connection_string of", "plain HTTP to another machine"),
    ],
)
def test_where_the_credentials_of_other_clouds_come_from(
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    options: dict[str, str],
    environment: dict[str, str],
    credentials: str,
    endpoint: str,
) -> None:
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "AZURE_", "STORAGE_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = Config.from_mapping({"storage_uri": uri, **({"storage_options": options} if options else {})})
    (said,), (place,) = doctor_object._credentials(config), doctor_object._endpoint(config)
    assert credentials in said.text and place.text.startswith(endpoint)
    assert "hidden" not in said.text + place.text


@pytest.mark.parametrize("kind", OVERWRITING)
def test_real_servers_that_overwrite(doctor: Doctor, stores: Stores, kind: str) -> None:
    arguments, limit = served_arguments(stores(kind)), ("--set", "storage_bytes=1GiB")
    report = doctor(*arguments, *limit)
    assert errors(report) == ["conditional writes"]
    assert "the server does not start" in found(report, "conditional writes", "error")
    promised = doctor(*arguments, *limit, "--set", "single_writer=true")
    assert promised["works"] and "where two servers meet" in found(promised, "conditional writes", "warning")
    assert doctor(*arguments)["works"]


@pytest.mark.parametrize("kind", ATOMIC)
def test_real_servers_that_do_not(doctor: Doctor, stores: Stores, kind: str) -> None:
    served = stores(kind)
    report = doctor(*served_arguments(served), "--set", "storage_bytes=1GiB")
    assert report["works"] and "refuses to overwrite" in found(report, "conditional writes", "ok")
    assert "plain HTTP, on this machine" in found(report, "endpoint", "ok")
    text = json.dumps(report)
    assert not [
        value for value in served.options().values() if value != "anon" and "http" not in value and value in text
    ]


def test_a_shared_directory_that_is_not_mounted(doctor: Doctor, tmp_path: Path) -> None:
    assert doctor(f"shared+file://{tmp_path}/shared", *SMALL[:2])["works"]
    report = doctor(f"shared+file://{tmp_path}/not/mounted", *SMALL[:2])
    assert errors(report) == ["object store"] and not (tmp_path / "not").exists()


@pytest.mark.parametrize(("hours", "word"), [(2, "behind"), (-2, "ahead of")])
def test_clocks_that_differ_are_a_warning(tmp_path: Path, hours: int, word: str) -> None:
    config = Config.from_mapping({"storage_uri": f"shared+file://{tmp_path}/shared"})
    with ObjectStorage(config.location(), timeout_s=10, concurrency=2) as storage:
        findings, *_ = doctor_object.check_object(config, storage, lambda: time.time() + hours * 3600)
    (clock,) = [f for f in findings if f.check == "clock"]
    assert clock.status == "warning" and word in clock.text and "NTP" in clock.hint


def test_a_bucket_is_listed_once_and_what_is_foreign_found_behind_any_number_of_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.from_mapping({"storage_uri": f"shared+file://{tmp_path}/shared"})
    with ObjectStorage(config.location(), timeout_s=10, concurrency=2) as storage:
        for number in range(5):
            storage.store.put(f"00/{number}", b"x")
        storage.store.put("_tiered_kv/not-ours", b"x")
        listed: list[str] = []
        real = storage.store.list
        monkeypatch.setattr(storage.store, "list", lambda prefix: listed.append(prefix) or real(prefix))

        def examine() -> bool:
            """Whether the listing was whole, once the foreign object has been named."""
            listed.clear()
            findings, _, content = doctor_object.check_object(config, storage)
            (foreign,) = [f for f in findings if f.check == "foreign objects"]
            assert "_tiered_kv/not-ours" in foreign.text and listed.count("") == 1
            return content.is_whole

        assert examine() and "_tiered_kv/" not in listed
        monkeypatch.setattr(doctor_object, "LISTED_MAX", 3)
        assert not examine() and "_tiered_kv/" in listed


AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE",
       "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
       "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")  # fmt: skip


def name_in_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """These variables of AWS's clients are set, and no others."""
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("options", "environment", "status", "text"),
    [
        ({"key": "hidden-k", "secret": "hidden-s"}, {}, "warning", "key and secret of storage_options"),
        ({"key": "hidden-k"}, {}, "error", "one is missing"),
        ({"anon": True}, {}, "warning", "asks without"),
        ({"profile": "work"}, {}, "ok", "the option profile"),
        ({}, {"AWS_ACCESS_KEY_ID": "hidden-k", "AWS_SECRET_ACCESS_KEY": "hidden-s"}, "ok", "in the environment"),
        ({}, {"AWS_ACCESS_KEY_ID": "hidden-k"}, "error", "AWS_SECRET_ACCESS_KEY is missing"),
        ({}, {"AWS_PROFILE": "work"}, "ok", "AWS_PROFILE names"),
        ({}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/hidden"}, "ok", "web identity"),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": __file__}, "ok", "configuration files"),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "", "AWS_CONFIG_FILE": ""}, "ok", "role of the container or instance"),
        ({}, {"AWS_CONFIG_FILE": "n" * 300}, "ok", "role of the container or instance"),  # as one below another's home
        ({}, {}, "ok", "role of the container or instance"),
    ],
)
def test_where_credentials_come_from_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], environment: dict[str, str], status: str,
    text: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    name_in_environment(monkeypatch, environment)
    config = Config.from_mapping({"storage_uri": "s3://bucket/p", "storage_options": options})
    (finding,) = doctor_object._credentials(config)
    assert finding.status == status and text in finding.text
    assert "hidden" not in finding.text + finding.hint


@pytest.mark.parametrize("where", ["option", "environment", "connection string"])
@pytest.mark.parametrize(
    ("end", "status", "text"),
    [
        ("2026-01-01T00%3A00%3A00Z", "error", "the SAS token ended at 2026-01-01 00:00 UTC"),
        (time.strftime("%Y-%m-%d", time.gmtime(time.time() + 3 * 86400)), "warning", "the SAS token ends at "),
        ("2999-01-01T00:00:00Z", "ok", "; the SAS token ends at 2999-01-01 00:00 UTC"),
        ("soon", "ok", "from "),
    ],
)
def test_a_sas_token_that_ends_is_told(
    monkeypatch: pytest.MonkeyPatch, where: str, end: str, status: str, text: str
) -> None:
    """A store says of it what it says of any that it refuses, and a server reads it once."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    token, options = f"sv=2022-11-02&se={end}&sig=hidden", {"account_name": "a"}
    if where == "option":
        options["sas_token"] = f"?{token}"
    elif where == "environment":
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token)
    else:
        options = {"connection_string": f"BlobEndpoint=https://a.example.org;SharedAccessSignature={token}"}
    config = Config.from_mapping({"storage_uri": "az://container/p", "storage_options": options})
    (finding,) = doctor_object._credentials(config)
    assert finding.status == status and text in finding.text and "hidden" not in finding.text
    if where == "environment":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "hidden")  # which comes first
        assert doctor_object._credentials(config)[0].status == "ok"


@pytest.mark.parametrize(
    ("endpoint", "status", "text"),
    [
        (None, "ok", "Amazon S3"),
        ("https://minio.example.org", "ok", "https"),
        ("http://127.0.0.1:9000", "ok", "on this machine"),
        ("http://localhost:9000", "ok", "on this machine"),
        ("http://minio.example.org:9000", "warning", "nothing is encrypted"),
        ("http://user:hidden@minio.example.org:9000", "error", "no address that clients can use"),
        ("https://minio.example.org?signature=hidden", "error", "no address that clients can use"),
    ],
)
def test_plain_http_to_another_machine_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, status: str, text: str
) -> None:
    for name in AWS:
        monkeypatch.delenv(name, raising=False)
    options = {}
    if endpoint is not None and status == "error":
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)  # our own option was checked when it was read
    elif endpoint is not None:
        options = {"endpoint_url": endpoint}
    config = Config.from_mapping({"storage_uri": "s3://bucket/p", "storage_options": options})
    (finding,) = doctor_object._endpoint(config)
    assert finding.status == status and text in finding.text and "hidden" not in finding.text


@pytest.mark.parametrize(
    ("options", "environment", "status", "text"),
    [
        ({}, {"AWS_ENDPOINT_URL": " HTTP://127.0.0.1:9000/#x"}, "ok", "plain HTTP, on this machine"),
        ({}, {"AWS_ENDPOINT_URL": "localhost:9000"}, "error", "no address that clients can use"),
        ({}, {"AWS_ENDPOINT_URL": "http://localhost:9000 "}, "error", "no address that clients can use"),
        ({"client_kwargs": {"endpoint_url": "http://a:hidden@b"}}, {}, "error", "no address that clients can use"),
        ({"client_kwargs": {"endpoint_url": "https://b"}}, {"AWS_ENDPOINT_URL": "x@"}, "ok", "a server of its own"),
        ({}, {"AWS_ENDPOINT_URL": "x@", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "True"}, "ok", "Amazon S3"),
    ],
)
def test_the_address_that_a_client_uses_is_judged(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: dict[str, str], status: str, text: str
) -> None:
    name_in_environment(monkeypatch, environment)
    config = Config.from_mapping({"storage_uri": "s3://bucket/p", "storage_options": options})
    (finding,) = doctor_object._endpoint(config)
    assert finding.status == status and text in finding.text and "hidden" not in finding.text


# -- the command ------------------------------------------------------------------------------------------------------


# -- peers ------------------------------------------------------------------------------------------------------------


def key_at(path: Path, digits: str = "5a") -> Path:
    path.write_text(digits * 32)
    path.chmod(0o600)
    return path


@contextmanager
def door_at(root: Path, key_file: Path) -> Iterator[str]:
    """Where a machine gives what lies in a directory."""
    given = {"storage_uri": f"file://{root}", "peer_listen": "127.0.0.1:0", "peer_key_file": str(key_file)}
    door = DoorProcess(Config.from_mapping(given))
    try:
        yield f"https://127.0.0.1:{door.port}"
    finally:
        door.close()


def peer_report(doctor: Doctor, root: Path, key_file: Path, **more: object) -> dict[str, Any]:
    return doctor("--config", json.dumps({"storage_uri": f"file://{root}", "peer_key_file": str(key_file), **more}))


def test_each_peer_is_asked(doctor: Doctor, tmp_path: Path) -> None:
    key, free = key_at(tmp_path / "key"), f"127.0.0.1:{free_port()}"
    with door_at(tmp_path / "a", key) as one, door_at(tmp_path / "b", key) as other:
        report = peer_report(doctor, tmp_path / "c", key, peers=[one, other], peer_listen=free)
    assert report["works"] and report["plan"].endswith(" -> 2 peers")
    texts = [f["text"] for f in report["findings"] if f["check"] == "peers"]
    assert [text.partition(" answers after ")[0] for text in texts] == [one, other]
    assert f"can listen at {free}" in found(report, "door", "ok")
    assert key.read_text() not in json.dumps(report)


def test_a_peer_that_is_away_is_a_warning(doctor: Doctor, tmp_path: Path) -> None:
    url = f"https://127.0.0.1:{free_port()}"
    report = peer_report(doctor, tmp_path / "c", key_at(tmp_path / "key"), peers=[url])
    assert report["works"]
    assert f"{url}: " in (text := found(report, "peers", "warning")) and "refused" in text


def test_peers_that_are_found_are_asked(doctor: Doctor, tmp_path: Path) -> None:
    key = key_at(tmp_path / "key")
    shared = {"storage_uri": f"shared+file://{tmp_path}/bucket", "disk_path": str(tmp_path / "c")}
    (tmp_path / "bucket").mkdir()
    with door_at(tmp_path / "a", key) as url:
        name = url.replace("https://127.0.0.1", "dns://localhost")
        report = peer_report(doctor, tmp_path, key, **shared, peers=["bucket", name])
        assert "bucket: no other machine is there now" in found(report, "peers", "warning")
        assert f"{url} answers after " in found(report, "peers", "ok")
        record = tmp_path / "bucket/_tiered_kv/peers" / url.removeprefix("https://")
        record.parent.mkdir(parents=True)
        record.touch()
        report = peer_report(doctor, tmp_path, key, **shared, peers=["bucket", "dns://name.invalid:1"])
        assert "dns://name.invalid:1: nobody can be looked for" in found(report, "peers", "warning")
        assert f"{url} answers after " in found(report, "peers", "ok")


def test_a_peer_with_another_key_would_never_answer(doctor: Doctor, tmp_path: Path) -> None:
    with door_at(tmp_path / "a", key_at(tmp_path / "key")) as url:
        report = peer_report(doctor, tmp_path / "c", key_at(tmp_path / "other", "5b"), peers=[url])
    assert "another certificate" in found(report, "peers", "error")


def test_a_peer_whose_clock_is_hours_off_refuses(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, now_s = key_at(tmp_path / "key"), time.time()
    with door_at(tmp_path / "a", key) as url:
        monkeypatch.setattr("tiered_kv.tiers.peers.peer.time.time", lambda: now_s - 3 * 3600)
        report = peer_report(doctor, tmp_path / "c", key, peers=[url])
    assert "hours apart" in found(report, "peers", "error")


@pytest.mark.parametrize(
    ("digits", "mode", "text"),
    [("5a", 0o644, "others may use"), ("x", 0o600, "64 hex digits"), (None, 0, "cannot read")],
)
def test_a_key_file_that_cannot_be_used(
    doctor: Doctor, tmp_path: Path, digits: str | None, mode: int, text: str
) -> None:
    if digits is not None:
        key_at(tmp_path / "key", digits).chmod(mode)
    report = peer_report(doctor, tmp_path / "c", tmp_path / "key", peers=["https://127.0.0.1:1"])
    assert text in found(report, "peer key", "error")


def test_a_port_that_is_taken_would_not_work(doctor: Doctor, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        report = peer_report(doctor, tmp_path / "c", key_at(tmp_path / "key"), peer_listen=listen)
    assert f"cannot listen at {listen}" in found(report, "door", "error")


def test_the_door_of_a_server_that_runs_is_asked(doctor: Doctor, root: Path, tmp_path: Path) -> None:
    key, listen = key_at(tmp_path / "key"), f"127.0.0.1:{free_port()}"
    ours = {"host_bytes": "64MiB", "disk_bytes": "160MiB"}
    engine = SmallEngine.start(settings(root, peer_listen=listen, peer_key_file=str(key), **ours))
    try:
        report = peer_report(doctor, root, key, peer_listen=listen, **ours)
        other = peer_report(doctor, root, key, peer_listen=f"127.0.0.1:{free_port()}", **ours)
    finally:
        engine.close()
    assert "gives blobs" in found(report, "door", "ok")
    assert "end that server" in found(other, "door", "warning")


def test_the_json_of_vllm_is_taken_inline_from_a_file_and_from_standard_input(
    doctor: Doctor, root: Path, tmp_path: Path
) -> None:
    extra = {"storage_uri": f"file://{root}", "host_bytes": "64MiB", "disk_bytes": "160MiB"}
    whole = json.dumps({"kv_connector": "TieredKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})
    (tmp_path / "vllm.json").write_text(whole)
    plan = f"host 64 MiB -> disk 160 MiB at {root}"
    for given in (whole, json.dumps(extra), str(tmp_path / "vllm.json")):
        report = doctor("--config", given)
        assert report["works"] and report["plan"] == plan
    result = CliRunner().invoke(app, ["doctor", "--config", "-"], whole)
    assert result.exit_code == 0 and result.stdout.startswith(plan)
    changed = doctor("--config", whole, "--set", "disk_bytes=200MiB")
    assert changed["plan"] == f"host 64 MiB -> disk 200 MiB at {root}"
    broken = doctor("--config", whole.replace("kv_both", "kv_bth"))
    assert errors(broken) == ["role"] and broken["plan"] == plan
    assert doctor("--config", "{")["plan"] == ""


def test_arguments_that_are_wrong_end_with_2(root: Path) -> None:
    for arguments, expected in (
        ((), "name either the storage URI or --config"),
        ((f"file://{root}", "--config", "{}"), "name either the storage URI or --config"),
        (("--config", f"{root}/none.json"), "no JSON, and no file that can be read: No such file"),
        ((f"file://{root}", "--chunk-bytes", "some"), "option --chunk-bytes: expected a size"),
        ((f"file://{root}", "--set", "x"), "expected NAME=VALUE"),
    ):
        result = CliRunner().invoke(app, ["doctor", *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        assert expected in result.stderr


# -- a Mooncake pool --------------------------------------------------------------------------------------------------


def test_a_mooncake_pool_is_tested_and_nothing_is_left(doctor: Doctor, mooncake: Pool) -> None:
    member = mooncake.member()
    report = doctor(mooncake.uri(), "--set", "host_bytes=64MiB")
    assert report["works"] and report["plan"].endswith(f"-> {mooncake.uri()} (its master evicts)")
    assert [(m["tier"], m["operation"]) for m in report["measurements"]] == [
        ("mooncake", "write"),
        ("mooncake", "read"),
    ]
    assert "was written, read, compared and removed" in found(report, "mooncake test", "ok")
    assert member.remove_all() == 0


def test_a_mooncake_pool_without_memory_or_master_is_an_error_that_says_so(doctor: Doctor, mooncake: Pool) -> None:
    report = doctor(mooncake.uri(), "--set", "host_bytes=64MiB")
    assert "no room for a blob" in found(report, "mooncake test", "error") and errors(report) == ["mooncake test"]
    mooncake.master.kill()
    report = doctor(mooncake.uri(), "--set", "host_bytes=64MiB")
    assert "nothing listens there; check that the master runs" in found(report, "mooncake test", "error")


def test_a_mooncake_pool_across_a_network_is_warned_about(doctor: Doctor) -> None:
    report = doctor("mooncake://nowhere.invalid:50051", "--set", "host_bytes=64MiB")
    assert "encrypts nothing" in found(report, "mooncake", "warning")
    assert "host name is not known" in found(report, "mooncake test", "error")


def test_without_mooncake_s_package_its_name_is_told(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    report = doctor("mooncake://127.0.0.1:1", "--set", "host_bytes=64MiB")
    assert "pip install mooncake-transfer-engine" in found(report, "mooncake", "error")


@pytest.mark.parametrize("verb", ["ls", "du", "tree", "gc", "verify", "stat", "evict"])
def test_what_must_list_refuses_a_mooncake_pool(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "mooncake://127.0.0.1:1/x"])
    assert result.exit_code == 2 and "nobody can list what is in one" in result.stderr


def test_regions_that_killed_engines_left_are_named_and_those_in_use_are_not(doctor, tmp_path):
    ours = {"type": "TieredKVTier", "module_path": "tiered_kv.vllm.offloading", "storage_uri": f"file://{tmp_path}"}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": [ours]}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    left, used = (SHARED_MEMORY / f"vllm_offload_{uuid.uuid4().hex}.mmap" for _ in range(2))
    with ExitStack() as undo:
        for place in (left, used):
            undo.callback(place.unlink)
            place.write_bytes(bytes(1 << 20))
        with used.open("r+b") as file:
            undo.enter_context(mmap.mmap(file.fileno(), 0))
        report = doctor("--config", json.dumps(connector), *SMALL)
        (text,) = [f["text"] for f in report["findings"] if "regions" in f["text"]]
        assert left.name in text and used.name not in text
        assert not [f for f in doctor(f"file://{tmp_path}", *SMALL)["findings"] if "regions" in f["text"]]
    assert left not in left_regions()
