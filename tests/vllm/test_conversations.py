"""Which prompts go on from an earlier one: follow-ups do, common beginnings and repeated prompts do not."""

import json
from pathlib import Path

import pytest

from tiered_kv.vllm import conversations
from tiered_kv.vllm.conversations import Conversations

CHUNK, BLOCK = 8, 2


class Seen:
    """What an engine has seen, told in tokens."""

    def __init__(self) -> None:
        self.known = Conversations()

    def goes_on(self, prompt: str) -> bool:
        whole = len(prompt) // CHUNK
        keys = [prompt[: (chunk + 1) * CHUNK].encode() for chunk in range(whole)]
        rest = len(prompt) % CHUNK
        return self.known.goes_on(keys, rest - rest % BLOCK, lambda c, n: prompt[: c * CHUNK + n].encode())


@pytest.fixture
def seen() -> Seen:
    return Seen()


SYSTEM = "a system prompt. "


@pytest.mark.parametrize("end", range(CHUNK + 1))
def test_each_turn_goes_on_from_the_one_before(seen: Seen, end: int) -> None:
    prompt = SYSTEM + "x" * end
    assert not seen.goes_on(prompt)
    for turn in range(6):
        prompt += f" answer {turn} and what is said to it"[: 2 * BLOCK + 3 * turn]
        assert seen.goes_on(prompt), prompt
    assert len(seen.known) == 1, "a conversation ends in one place"


def test_a_common_beginning_is_no_conversation(seen: Seen) -> None:
    questions = ["one", "another question", "a third one, somewhat longer", "what", "why is it so"]
    assert not any(seen.goes_on(SYSTEM + question) for question in questions)


def test_a_repeated_prompt_and_a_shorter_one_go_on_from_nothing(seen: Seen) -> None:
    prompt = SYSTEM + "abcde"
    assert [seen.goes_on(one) for one in (prompt, prompt, prompt + "f", prompt[:-2])] == [False] * 4, "no block more"
    assert seen.goes_on(prompt + "fgh")


def test_of_many_that_ask_about_one_document_one_goes_on_from_it(seen: Seen) -> None:
    document = "a long text, sent first. "
    assert not seen.goes_on(document)
    assert [seen.goes_on(f"{document}{number} question") for number in range(5)] == [True, False, False, False, False]


def test_a_prompt_that_is_edited_before_its_end_goes_on_from_nothing_and_is_gone_on_from(seen: Seen) -> None:
    prompt = SYSTEM + "abcdefgh"
    seen.goes_on(prompt)
    edited = prompt[:-6] + "EDITED"
    assert not seen.goes_on(edited)
    assert seen.goes_on(edited + " and more") and seen.goes_on(prompt + " and more")


def test_prompts_below_a_chunk_and_without_names_are_left_alone(seen: Seen) -> None:
    assert not seen.goes_on("short") and not seen.goes_on("shorter")
    assert not seen.known.goes_on([b"k"], BLOCK, lambda *_: None)
    assert len(seen.known) == 0


def test_what_is_remembered_is_bounded(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "ENDS_MAX", 12)
    monkeypatch.setattr(conversations, "ENDS_BEHIND_MAX", 4)
    for number in range(9):
        seen.goes_on(f"{number} is a chunk")
        seen.goes_on(f"{SYSTEM}of all: {number}")
        remembered = sum(map(len, seen.known._ends.values()))
        assert len(seen.known) == remembered <= 12
    assert remembered >= 12 - 4
    assert not seen.goes_on("0 is a chunk, gone on from")
    assert seen.goes_on("8 is a chunk, gone on from")


def test_of_recorded_requests_those_that_begin_a_conversation_or_ask_once_go_on_from_nothing(repository: Path) -> None:
    """The first of an hour: all begin with the same 512 tokens, which tells nothing, and one in seven goes on."""
    rows = map(json.loads, (repository / "tests" / "data" / "conversation_trace_small.jsonl").read_text().splitlines())
    known, ends = Conversations(), set[tuple[int, ...]]()
    going_on = asked_once = 0
    for row in rows:
        prompt = row["hash_ids"][1 : row["input_length"] // 512]
        goes_on = known.goes_on([b"%d" % block for block in prompt], 0, lambda *_: None)
        is_first = not any(tuple(prompt[:end]) in ends for end in range(1, len(prompt)))
        assert not (goes_on and is_first)
        going_on, asked_once = going_on + goes_on, asked_once + is_first
        ends.add(tuple(prompt))
    assert (going_on, asked_once) == (138, 854)


def test_many_ends_behind_many_chunks_are_bounded_together(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "ENDS_MAX", 100)
    for number in range(1000):
        seen.goes_on(f"chunk {number % 50:02d}end {number}")
        assert len(seen.known) == sum(map(len, seen.known._ends.values())) <= 100
    assert seen.goes_on("chunk 49end 999, gone on from")


def test_a_sessions_name_is_believed_until_too_few_of_its_requests_were_gone_on_from(seen: Seen) -> None:
    known = seen.known
    assert [known.believes(b"app", goes_on=False) for _ in range(7)] == [True] * 4 + [False] * 3
    assert known.believes(b"run", goes_on=False), "another session's is"
    assert known.believes(b"app", goes_on=True), "what goes on is"
    assert [known.believes(b"app", goes_on=False) for _ in range(2)] == [True, False]
    assert [known.believes(b"run", goes_on=bool(turn % 2)) for turn in range(40)] == [True] * 40


def test_names_of_sessions_are_bounded(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "SESSIONS_MAX", 3)
    for number in range(9):
        for _ in range(5):
            seen.known.believes(b"%d" % number, goes_on=False)
    assert len(seen.known._in_vain) == 3
    assert not seen.known.believes(b"8", goes_on=False) and seen.known.believes(b"0", goes_on=False)
