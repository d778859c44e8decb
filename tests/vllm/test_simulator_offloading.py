"""Our tier below vLLM's own offloading, in the simulator: kinds of KV that no engine on a CPU has, and several ranks.

vLLM's schedulers, its offloading connector and tiering manager run as they are, and its worker's arithmetic with a copy
by the CPU (``tests/kit/vllm/host_offloading.py``); kernels do not (``tests/sim/vllm``). What attention reads is checked
state by state, so a byte of another group, rank or prompt in a row is a wrong answer.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.kit.counts import count
from tests.kit.server.probe import wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.offloading_engine import extra_config, on_disk
from tests.kit.vllm.row_patience import patient_rows
from tests.sim.vllm.asking import come_to_rest, parameters, random_tokens
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tests.sim.vllm.families import DRAFTS, FAMILIES, LAYER_OUTERMOST, ONLY_V2, Kind, mla
from tiered_kv.errors import TieredKVError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OLD = 0xA7
"""What vLLM's rows are full of before anything is stored: other prompts' KV."""

OLD_RUN = bytes([OLD]) * 16

CANONICAL = {"canonical_layout": True}

SERVED = [family for family in FAMILIES if family != "ring"]
TRIED = SERVED if count("MODELS", 0) else ["mla_windows", "state_window", "draft_window"]


_SOURCE = random.Random(1)
PROMPTS = [random_tokens(_SOURCE, length) for length in (96, 97, 95, 50, 33)]
PROMPTS.append(PROMPTS[0][:64] + random_tokens(_SOURCE, 16))


class Engine:
    """An engine of one family with our tier below its host memory."""

    def __init__(self, root: Path, family: str = "", **changes: Any) -> None:
        extra: dict[str, Any] = changes.pop("extra", {})
        settings = extra_config(
            on_disk(root), 1, row_bytes=changes.pop("host_bytes", 64 << 20), block_size=None, model_id="simulated"
        )
        setup = Setup(
            family=family,
            is_hybrid=True,
            is_v2=family in ONLY_V2,
            layout=changes.pop("layout", "LBHNC" if family in LAYER_OUTERMOST else "BLHNC"),
            requests_max=2,
            token_budget=32,
            pool_blocks=changes.pop("pool_blocks", 200),
            draft_tokens=2 if family in DRAFTS else 0,
            offloading=settings | extra,
            **changes,
        )
        self.root, self.engine, self.hits = root, SimulatedEngine(setup), [0]
        (self.tier,) = self.engine.connector.scheduler.manager.secondary_tiers
        self.tier._rows[:] = OLD
        allocated = self.engine.connector.update_state_after_alloc

        def note(request: Any, blocks: Any, external_tokens: int) -> None:
            self.hits[-1] += external_tokens
            allocated(request, blocks, external_tokens)

        self.engine.connector.update_state_after_alloc = note

    def ask(self, *prompts: list[int], max_tokens: int = 9) -> list[int]:
        """Ask each with an empty GPU cache; returns how many of its tokens were loaded."""
        hits = []
        for prompt in prompts:
            self.hits.append(0)
            self.engine.add(f"r{len(self.engine.answers)}", prompt, parameters(max_tokens))
            come_to_rest(self.engine)
            hits.append(self.hits[-1])
            assert self.engine.scheduler.reset_prefix_cache()
        findings = self.engine.findings
        assert not findings.wrong and findings.checked_tokens and not findings.wrong_draft_tokens, findings.wrong
        return hits

    def stop(self) -> None:
        wait_written(self.root)
        self.engine.close()
        end_server(self.root)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines on one directory."""
    # vLLM's offloading asks for one block more than it stores where a window ends with a block's first token.
    for family, kinds in FAMILIES.items():
        monkeypatch.setitem(FAMILIES, family, tuple(map(_with_whole_windows, kinds)))
    made: list[Engine] = []

    def make(family: str = "", **changes: Any) -> Engine:
        made.append(Engine(tmp_path / "cache", family, **changes))
        return made[-1]

    with patient_rows():
        yield make
        for one in made:
            one.engine.close()
    end_server(tmp_path / "cache")


def _with_whole_windows(kind: Kind) -> Kind:
    spec: Any = kind.spec
    window = getattr(spec, "sliding_window", None)
    if window is None or window % spec.block_size != 1:
        return kind
    return replace(kind, spec=replace(spec, sliding_window=window + 1))


def stored_and_loaded(engines: Callable[..., Engine], family: str, **changes: Any) -> tuple[list[int], Engine]:
    """Ask, ask again what vLLM's own memory has, restart, and ask the disk: the same tokens have to be hits."""
    one = engines(family, **changes)
    assert one.ask(*PROMPTS[:-1]) == [0] * (len(PROMPTS) - 1)
    one.ask(PROMPTS[-1])
    own = one.ask(*PROMPTS)
    assert all(own), own
    one.stop()
    if all(group.spans for group in one.tier._groups):  # else rows are stored whole, with what pads them
        assert not [path.name for path in blob_files(one.root) if OLD_RUN in path.read_bytes()]
    again = engines(family, **changes)
    assert again.ask(*PROMPTS) == own
    return own, again


@pytest.mark.parametrize("family", TRIED)
def test_kinds_of_layers_come_back_from_disk_as_from_vllms_own_memory(
    family: str, engines: Callable[..., Engine]
) -> None:
    _, one = stored_and_loaded(engines, family)
    groups = one.tier._groups
    if family == "mla_windows":  # DeepSeek V4: a row is a block of all layers, and each group has a part of it
        row_bytes = one.tier.block_size_bytes
        assert len(groups) == 4 and all(0 < group.stored_bytes < row_bytes for group in groups)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mla_windows", {}),
        ("compressed", {"layout": "BLHNC", "extra": {"blocks_per_chunk": 2}}),
        ("state_window", {"layout": "LBHNC", "extra": CANONICAL}),
        ("compressed", {"layout": "LBHNC", "extra": CANONICAL | {"blocks_per_chunk": 2}}),
        ("", {"windows": (None, 12, None, 12), "layout": "LBHNC", "extra": CANONICAL}),
    ],
    ids=["packed", "packed rows of two blocks", "canonical states", "canonical MLA", "canonical windows"],
)
def test_two_ranks_share_rows(family: str, changes: dict[str, Any], engines: Callable[..., Engine]) -> None:
    stored_and_loaded(engines, family, ranks=2, **changes)


def test_engines_of_one_and_of_two_ranks_share_canonical_rows(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MLA, all ranks' KV of which is the same; heads that are split: ``test_rows_of_ranks.py``."""
    monkeypatch.setitem(FAMILIES, "compressed", (mla(), mla(), mla()))
    one = engines("compressed", extra=CANONICAL)
    one.ask(*PROMPTS)
    own = one.ask(*PROMPTS)
    one.stop()
    two = engines("compressed", ranks=2, extra=CANONICAL)
    assert two.ask(*PROMPTS) == own and all(own)
    two.stop()
    assert engines("compressed", ranks=2).ask(PROMPTS[0]) == [0], "direct rows are not theirs"


def test_a_streaming_session_leaves_nothing_wrong_behind(engines: Callable[..., Engine]) -> None:
    """vLLM's offloading gives the last rows of a session the KV of other tokens, and its own memory serves them."""
    one = engines()
    assert one.ask(PROMPTS[3]) == [0]
    session, source = "session", random.Random(2)
    for tokens in (21, 20, 20):
        one.engine.add(session, random_tokens(source, tokens), parameters(6), resumable=True)
        while one.engine.scheduler.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            one.engine.step()
    one.engine.add(session, [1], parameters(1))
    come_to_rest(one.engine)
    told = one.engine.answers[session].tokens
    one.ask(PROMPTS[0])
    one.stop()
    hits = engines().ask(told, PROMPTS[0], PROMPTS[3])
    assert hits[:2] == [0, 0] and hits[2], hits


@pytest.mark.parametrize(("block_hash", "seeds", "hit"), [("xxhash", "77", 96), ("xxhash_cbor", "78", 0)])
def test_rows_that_are_named_by_a_seeded_hash_are_found_with_that_seed_alone(
    block_hash: str, seeds: str, hit: int, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a hash has 16 bytes, and the digest that tells chunks of one key apart is made of all that names a row."""
    hits = []
    for seed in seeds:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        one = engines(block_hash=block_hash)
        hits += one.ask(PROMPTS[1])
        one.stop()
    assert hits == [0, hit]


def test_a_model_of_text_is_served_without_vllms_prefix_cache(engines: Callable[..., Engine]) -> None:
    """It counts no images: it takes none."""
    first = engines(has_prefix_caching=False)
    assert first.ask(PROMPTS[1]) == [0]
    first.stop()
    assert engines(has_prefix_caching=False).ask(PROMPTS[1]) == [96]


def test_a_request_that_goes_on_after_a_preemption_takes_no_room_from_others(engines: Callable[..., Engine]) -> None:
    """vLLM names new requests to its tiers, and not those that it goes on with. Nothing more is stored of this one."""
    first = engines(has_prefix_caching=False)
    first.ask(PROMPTS[1])
    first.stop()
    one = engines(extra={"offload_prompt_only": True}, pool_blocks=55, has_prefix_caching=False)
    scheduler, manager = one.engine.scheduler, one.engine.connector.scheduler.manager
    one.engine.add("long", PROMPTS[3], parameters(60))
    one.engine.add("preempted", PROMPTS[1], parameters(40))
    _step_until(one, lambda: one.engine.preemptions == 1)
    one.hits.append(0)
    _step_until(one, lambda: not manager.has_pending_work())
    manager.primary_tier.reset_cache()  # its rows were evicted for others'
    request = scheduler.requests["preempted"]
    _step_until(one, lambda: request in scheduler.running)
    assert one.hits[-1] and not one.tier._hits
    come_to_rest(one.engine)
    assert not one.engine.findings.wrong


def _step_until(one: Engine, holds: Callable[[], bool]) -> None:
    def is_so() -> bool:
        one.engine.step()
        return holds()

    wait_for(is_so, "the engine")


def test_pages_that_are_made_of_a_ring_are_refused(engines: Callable[..., Engine]) -> None:
    """GLM 5.3, Qwen 4: vLLM 0.32 itself goes on inside a ring's group, which its hit does not bring, and is wrong."""
    with pytest.raises(TieredKVError, match="ring"):
        engines("ring")
