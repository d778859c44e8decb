"""Tails on a real disk, with every byte compared: written, killed at every step, read by the next start."""

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.counts import count, seed
from tests.kit.engine_world import BLOB_BYTES, EngineWorld, payload_of
from tests.kit.step_executor import StepExecutor
from tests.kit.storage.disk_probe import blob_files, du_bytes, open_disk, temp_files
from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.types import Limits, Tail

STRIDE = count("TAIL_KILL_STRIDE", 3)
"""Steps from one kill to the next; 1: before each."""

TOKENS = 4
LIMIT_BYTES = 60 * BLOB_BYTES + (1 << 20)
PROMPT = tuple(range(Limits().few_chunks))
NEXT = (*PROMPT, 99)


class TailWorld(EngineWorld):
    """An engine over a disk tier whose client keeps tails."""

    def __init__(self, root: Path) -> None:
        super().__init__(open_disk(root, LIMIT_BYTES))
        self.session = self.open()
        self.settle()

    def keep(self, name: str) -> None:
        """Fill a slot with a tail and let everything end."""
        client = self.clients[self.session]
        slot, record = client.credits.pop(0), client.space.tail(PROMPT, name, TOKENS)
        with self.engine.slot_view(slot, client.form.blob_bytes) as view:
            view[:] = b"\xee" * len(view)
            start = client.form.header_bytes
            view[start : start + client.data_bytes] = payload_of(record.key, client.data_bytes)
        self.engine.commit_tail(self.session, slot, record)
        self.settle()

    def found(self, names: str, path: tuple[int, ...] = NEXT) -> list[str]:
        """Which of these tails behind ``PROMPT`` a prompt may load; the bytes of each are compared."""
        client = self.clients[self.session]
        keys, digests = client.space.prefix(path)
        lookup = self.tiering.lookup(self.session, LookupRequest(keys, digests, wants_tails=True))
        answers = []
        while not answers or not answers[-1].is_done:
            answers += [one.answer for one in self.engine.step() if getattr(one, "lookup", None) == lookup]
            self.executor.step()  # type: ignore[attr-defined]
        found = [name for name in names for tail in answers[-1].tails if self._is(tail, name)]
        self.tiering.release(self.session, lookup)
        self.settle()
        return found

    def _is(self, tail: Tail, name: str) -> bool:
        client = self.clients[self.session]
        record = client.space.tail(PROMPT, name, TOKENS)
        if tail.digest != record.prefix_sha256 or tail.slot is None:
            return False
        with self.engine.slot_view(tail.slot, client.form.blob_bytes) as view:
            start = client.form.header_bytes
            assert view[start : start + client.data_bytes] == payload_of(record.key, client.data_bytes), "wrong bytes"
        return True

    def drop(self, name: str) -> None:
        self.engine.drop_tails(self.session, [self.clients[self.session].space.tail(PROMPT, name, TOKENS).key])
        self.settle()

    def save(self) -> None:
        self.engine.save_tails()
        self.settle()


def tail_files(root: Path) -> list[Path]:
    return [path for path in blob_files(root) if tail_tokens(bytes.fromhex(path.stem))]


def a_life(root: Path) -> None:
    """Two tails, of which the second takes the first one's place on disk, and goes; then another one."""
    world = TailWorld(root)
    if world.loaded(world.session, PROMPT) < len(PROMPT):
        world.store(world.session, PROMPT)
    world.keep("a")
    world.save()
    world.keep("b")
    world.save()
    assert world.found("ab") == ["b"]
    world.drop("b")
    assert tail_files(root) == []
    world.keep("c")
    world.save()
    world.engine.close()


def test_the_file_is_a_blob_that_says_how_long_its_tail_is(tmp_path: Path) -> None:
    world = TailWorld(tmp_path)
    world.store(world.session, PROMPT)
    world.keep("a")
    assert world.found("a") == ["a"] and tail_files(tmp_path) == []
    world.save()
    (file,) = tail_files(tmp_path)
    header = peek(file.read_bytes()[:PEEK_BYTES])
    record = world.clients[world.session].space.tail(PROMPT, "a", TOKENS)
    assert (header.token_count, header.record) == (TOKENS, record) and file.stem.endswith("7461696c04000000")
    assert file.stat().st_size == BLOB_BYTES, "as long as a chunk's"
    assert world.tiering.tier_usage(1).used_bytes == du_bytes(tmp_path / "blobs") == (len(PROMPT) + 1) * BLOB_BYTES
    world.check_idle()
    world.engine.close()
    again = TailWorld(tmp_path)
    assert again.found("a") == ["a"]
    again.engine.close()


def test_a_flipped_bit_costs_the_tail_and_nothing_else(tmp_path: Path) -> None:
    a_life(tmp_path)
    (file,) = tail_files(tmp_path)
    data = bytearray(file.read_bytes())
    data[-4096] ^= 1
    file.write_bytes(data)
    world = TailWorld(tmp_path)
    assert world.found("c") == [] and tail_files(tmp_path) == []
    assert world.loaded(world.session, PROMPT) == len(PROMPT)
    world.engine.close()


@pytest.mark.parametrize(
    "damage", ["empty", "truncated", "too long", "garbage", "a chunk's", "another tail's", "folder"]
)
def test_whatever_lies_under_a_tails_name_at_a_start_is_no_tail(tmp_path: Path, damage: str) -> None:
    a_life(tmp_path)
    (file,) = tail_files(tmp_path)
    whole = file.read_bytes()
    chunk = next(one for one in blob_files(tmp_path) if one != file)
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(
            {
                "empty": b"",
                "truncated": whole[: len(whole) // 2],
                "too long": whole + bytes(4096),
                "garbage": bytes(range(256)) * (len(whole) // 256),
                "a chunk's": chunk.read_bytes(),
                "another tail's": another_tail(tmp_path / "other"),
            }[damage]
        )
    world = TailWorld(tmp_path)
    assert world.found("abc") == [], "nor of another name"
    assert world.loaded(world.session, PROMPT) == len(PROMPT)
    world.keep("c")
    assert world.found("c") == ["c"]
    world.save()
    world.check_idle()
    world.engine.close()


def another_tail(root: Path) -> bytes:
    world = TailWorld(root)
    world.store(world.session, PROMPT)
    world.keep("a")
    world.save()
    world.engine.close()
    return tail_files(root)[0].read_bytes()


def test_a_tail_that_a_kill_left_beside_the_chunk_that_continues_it_is_offered_to_forks_alone(tmp_path: Path) -> None:
    """The chunk is stored and its client is killed before it says what it continues."""
    world = TailWorld(tmp_path)
    world.store(world.session, PROMPT)
    world.keep("a")
    world.save()
    world.store(world.session, NEXT)
    world.engine.close()
    world = TailWorld(tmp_path)
    assert len(tail_files(tmp_path)) == 1 and world.loaded(world.session, NEXT) == len(NEXT)
    assert world.found("a", (*NEXT, 7)) == [], "who has the chunk is told of none"
    assert world.found("a", (*PROMPT, 98)) == ["a"], "whether it fits, its client sees by its digest"
    world.keep("b")
    world.save()
    assert world.found("ab", (*PROMPT, 98)) == ["a", "b"], "the first one is in host memory again"
    assert len(tail_files(tmp_path)) == 1, "one stays, not one for each kill"
    world.check_idle()
    world.engine.close()


def test_a_tail_of_another_namespace_under_the_same_chunks_is_left_alone(tmp_path: Path) -> None:
    """As of another chunk size or model: nobody of this namespace is told of it or removes it."""
    a_life(tmp_path)
    (file,) = tail_files(tmp_path)
    other = tmp_path / "blobs" / ("ab" * 16)
    (other / file.parent.name).mkdir(parents=True)
    moved = file.rename(other / file.parent.name / file.name)
    world = TailWorld(tmp_path)
    assert world.found("c") == []
    world.keep("c")
    world.drop("c")
    world.keep("c")
    world.save()
    assert world.found("c") == ["c"] and moved.exists() and len(tail_files(tmp_path)) == 2
    world.engine.close()


def test_without_the_index_a_tail_is_found_by_its_header(tmp_path: Path) -> None:
    a_life(tmp_path)
    for file in (tmp_path / "index").iterdir():
        file.unlink()
    world = TailWorld(tmp_path)
    assert world.found("c") == ["c"]
    world.engine.close()


def test_wherever_it_is_killed_the_next_start_finds_nothing_wrong(tmp_path: Path) -> None:
    """A process that ends itself with SIGKILL before each step: a job, a rename, a removal."""
    before = TailWorld(tmp_path / "before")
    before.store(before.session, PROMPT)
    before.engine.close()
    ends: dict[tuple[str, ...], int] = {}
    number = seed() % STRIDE
    while True:
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", root)
        if not killed_before(number, lambda: a_life(root)):  # noqa: B023  # runs at once
            break
        world = TailWorld(root)
        assert temp_files(root) == []
        left = tuple(world.found("abc"))
        assert len(left) <= 1 and len(tail_files(root)) <= 1, "one behind a chunk"
        assert len(tail_files(root)) == world.tiering.stats[1].tails
        assert world.tiering.tier_usage(1).used_bytes == du_bytes(root / "blobs") <= LIMIT_BYTES
        assert world.errors.messages == []
        world.check_idle()
        world.engine.close()
        ends[left] = ends.get(left, 0) + 1
        number += STRIDE
    assert {("a",), ("b",), ()} <= ends.keys(), f"kills came at too few moments. found={ends}"


def killed_before(step: int, life: Callable[[], None]) -> bool:
    """Live in another process that is killed before one of its steps; False where it has fewer."""
    child = os.fork()
    if child == 0:
        try:
            _count_steps(step)
            life()
        except BaseException:  # noqa: BLE001  # it must not go on as a second pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed before it was killed"
    return os.WIFSIGNALED(status)


def _count_steps(left: int) -> None:
    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*given: object, **named: object) -> object:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return call(*given, **named)

        return wrapper

    for name in ("replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    StepExecutor.step = counted(StepExecutor.step)  # type: ignore[assignment,method-assign]
