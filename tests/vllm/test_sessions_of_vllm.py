"""Streaming sessions: vLLM's own code cuts off and adds tokens, and our keys are those of what is computed for good."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from tests.kit.counts import count, seed
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.vllm import request_extras as door
from tiered_kv.vllm.identity.adapters import Adapters, Unaccountable
from tiered_kv.vllm.request_extras import SESSIONS_FROM, RequestExtras
from tiered_kv.vllm.requests import RequestState, final_tokens, storable_tokens

pytestmark = pytest.mark.vllm

CHUNK = 4
NAMESPACE = Namespace.from_fields(dict.fromkeys(REQUIRED_FIELDS, "test") | {"format_version": 1})
SAMPLING = SamplingParams(max_tokens=64)


@pytest.fixture(autouse=True)
def any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to tokens is the same in 0.30; what it gets wrong there is the steps in flight."""
    monkeypatch.setattr(door, "SESSIONS_FROM", (0, 0))


def session(tokens: list[int]) -> tuple[Request, RequestState]:
    request = Request("session", list(tokens), SAMPLING, None, resumable=True)
    extras = RequestExtras(request, CHUNK, Adapters("bfloat16"))
    assert extras.is_accountable, extras.reason
    return request, RequestState(request, extras)


def more_input(request: Request, tokens: list[int]) -> None:
    """What vLLM's scheduler does with the next piece of a session's input."""
    update = StreamingUpdate([], list(tokens), 64, 0.0, SAMPLING)
    scheduler: Any = SimpleNamespace(hash_block_size=CHUNK, log_stats=False, num_waiting_for_streaming_input=1)
    Scheduler._update_request_as_session(scheduler, request, update)
    assert request.status == RequestStatus.WAITING


def answer(request: Request, tokens: list[int]) -> None:
    """The session computes its prompt and generates; the last token's KV is never computed."""
    for token in tokens:
        request.append_output_token_ids(token)
    request.num_computed_tokens = request.num_tokens - 1


def keys_of(tokens: list[int]) -> list[bytes]:
    keys = PrefixKeys(NAMESPACE, CHUNK)
    keys.extend(tokens)
    return keys.keys


def test_the_last_generated_token_is_never_named() -> None:
    request, state = session(list(range(6)))
    answer(request, [10, 11])  # the second chunk ends with the token that vLLM will cut off
    assert request.num_tokens == 2 * CHUNK and final_tokens(request) == 2 * CHUNK - 1
    assert len(state.update_keys(NAMESPACE, CHUNK).keys) == 1
    more_input(request, [20, 21])
    assert request._all_token_ids == [*range(6), 10, 20, 21]
    assert state.update_keys(NAMESPACE, CHUNK).keys == keys_of([*range(6), 10, 20])


def test_keys_follow_any_session() -> None:
    """Whatever is named at any moment is the key of the tokens that vLLM has in the end."""
    for number in range(count("SESSIONS", 60)):
        source = random.Random(1000 * seed() + number)
        request, state = session([source.randrange(50) for _ in range(source.randrange(1, 20))])
        named: list[bytes] = []
        for _ in range(6):
            answer(request, [source.randrange(50) for _ in range(source.randrange(1, 10))])
            found = state.update_keys(NAMESPACE, CHUNK).keys
            assert found[: len(named)] == named, f"seed={number}"
            named = list(found)
            more_input(request, [source.randrange(50) for _ in range(source.randrange(0, 12))])
        assert keys_of(request._all_token_ids)[: len(named)] == named, f"seed={number}"


def test_generated_tokens_are_storable_only_when_asked_for_and_computed() -> None:
    request = Request("id", list(range(10)), SAMPLING, None)
    request.append_output_token_ids(list(range(20, 27)))
    assert storable_tokens(request, 40, saves_generated=False) == 10
    assert storable_tokens(request, 40, saves_generated=True) == 16, "of 17 tokens the last one's KV is not computed"
    assert storable_tokens(request, 13, saves_generated=True) == 13
    assert storable_tokens(request, 4, saves_generated=True) == 4


def test_a_session_that_vllm_lost_tokens_of_is_left_alone() -> None:
    """Up to 0.32: preempted in the step before its answer ends, vLLM drops all that came before the new input."""
    request, state = session(list(range(9)))
    answer(request, [30, 31])
    assert len(state.update_keys(NAMESPACE, CHUNK).keys) == 2
    request.num_computed_tokens = 0
    more_input(request, [40] * 5)
    if request._all_token_ids == [*range(9), 30, *[40] * 5]:
        assert len(state.update_keys(NAMESPACE, CHUNK).keys) == 3  # 0.33 keeps them
        return
    assert request._all_token_ids == [40] * 5
    with pytest.raises(Unaccountable, match="lost tokens"):
        state.update_keys(NAMESPACE, CHUNK)
    assert not state.extras.is_accountable


def test_a_session_whose_past_was_rewritten_is_left_alone() -> None:
    request, state = session(list(range(9)))
    answer(request, [30])
    assert len(state.update_keys(NAMESPACE, CHUNK).keys) == 2
    more_input(request, [40] * 5)
    request._all_token_ids[2] = request.prompt_token_ids[2] = 49
    with pytest.raises(Unaccountable, match="rewrote"):
        state.update_keys(NAMESPACE, CHUNK)


def test_sessions_need_a_vllm_that_ends_their_turns_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SESSIONS_FROM", SESSIONS_FROM)
    request = Request("id", [1] * 9, SAMPLING, None, resumable=True)
    for version, is_supported in (("0.30.2", False), ("0.31.0", True), ("0.32.0+cpu", True), ("1.0", True)):
        monkeypatch.setattr(vllm, "__version__", version)
        extras = RequestExtras(request, CHUNK, Adapters("bfloat16"))
        assert extras.is_accountable is is_supported
        assert is_supported or "0.31 or later. observed=0.30.2" in str(extras.reason)
