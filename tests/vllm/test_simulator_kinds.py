"""Kinds of KV beyond full attention and plain windows, by vLLM's real specs and block managers in the simulator.

``tests/sim/vllm/families.py`` has the families. No engine on a CPU runs such a model, so what is shown here is
"simulated" in docs/models.md: which blocks vLLM keeps and what it attends to are its own code's word, the kernels are
not run. Each family is asked random prompts under pressure, and each has errors planted that must be noticed.
"""

import random
from dataclasses import replace

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

from tests.kit.counts import count, seed
from tests.kit.server.probe import wait_written
from tests.kit.server.processes import end_server
from tests.sim.vllm.asking import AskedEngine, come_to_rest, parameters, random_tokens, settings
from tests.sim.vllm.checks import leaks, server_leaks
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tests.sim.vllm.families import ATTENTION, FAMILIES, LAYER_OUTERMOST, ONLY_V2
from tests.sim.vllm.faults import (
    change_stored_tokens,
    load_leaves_one_block,
    loads_said_to_bring_all_groups,
    prompts_loaded_whole,
)
from tests.sim.vllm.scenario import Plan, run_scenario
from tiered_kv.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SEEDS = count("KIND_SEEDS", 2)
CHUNK = 16


@pytest.mark.parametrize("number", range(seed(), seed() + SEEDS))
@pytest.mark.parametrize("family", ATTENTION)
def test_seed(family, number, tmp_path):
    """Random engines, prompts, pressure and faults, as for the other models."""
    plan = Plan.draw(
        number,
        tmp_path / "cache",
        is_v2=bool(number & 1) or family in ONLY_V2,
        is_async=bool(number & 2),
        family=family,
    )
    outcome = run_scenario(plan, tmp_path / "cache")
    print(f"family={family} seed={number} {dict(outcome.counts)}")
    assert not outcome.wrong, "\n".join([f"family={family} seed={number}", repr(plan), *outcome.wrong])
    assert outcome.counts["checked_tokens"] and not outcome.counts["wrong_tokens"]


class Asked(AskedEngine):
    """One family's engine, asked the same prompts twice: between, its GPU forgets everything."""

    def __init__(self, root, family, *, is_v2=False, layout="", chunk_tokens=CHUNK):
        setup = Setup(
            family=family,
            is_hybrid=True,
            is_v2=is_v2 or family in ONLY_V2,
            layout=layout or ("LBHNC" if family in LAYER_OUTERMOST else "BLHNC"),
            ranks=2,
            requests_max=2,
            token_budget=32,
            connector=settings(root, chunk_tokens),
        )
        self.setup = replace(setup, pool_blocks=setup.pool_blocks_min)
        self.root = root
        source = random.Random(1)
        # Whole chunks, one token more or less, and what is no multiple of anything; some with a common beginning.
        self.prompts = [random_tokens(source, length) for length in (96, 97, 95, 50, 33)]
        self.prompts += [self.prompts[0][:64] + random_tokens(source, length) for length in (16, 23)]
        self.engine = SimulatedEngine(self.setup)

    def ask(self, max_tokens=9):
        for prompt in self.prompts:
            self.engine.add(f"r{len(self.engine.answers)}", prompt, parameters(max_tokens))
        come_to_rest(self.engine)
        assert self.engine.scheduler.reset_prefix_cache()

    def ask_until_stored(self):
        """Ask until all is stored: in so tight a pool a window may pass while its chunk waits for a slot.

        An answer's chunk that ends with an attention chunk never is: vLLM has its blocks back when its last token is
        known.
        """
        for _ in range(10):
            before = self.counters["stores"]
            self.ask()
            if self.counters["stores"] == before:
                return
        pytest.fail(f"still stored after ten rounds: {dict(self.counters)}")

    def stop(self):
        wait_written(self.root)
        self.engine.close()
        end_server(self.root)

    def group_of(self, layer):
        groups = self.engine.scheduler.kv_cache_config.kv_cache_groups
        return next(n for n, group in enumerate(groups) if f"model.layers.{layer}.attn" in group.layer_names)


@pytest.fixture
def asked(tmp_path):
    made = []

    def make(family, **changes):
        made.append(Asked(tmp_path / "cache", family, **changes))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()
        end_server(one.root)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("family", ATTENTION)
def test_what_was_stored_is_loaded_and_right(asked, family, runner):
    """Every prompt hits as far as whole chunks before its last token go, from host memory and then from disk."""
    if runner == "v1" and family in ONLY_V2:
        pytest.skip("vLLM runs it with V2 only")
    one = asked(family, is_v2=runner == "v2")
    shared = 64 * 2  # of the two that begin as the first: on the GPU, or loaded if that left them no block
    one.ask()
    assert one.counters["load_tokens"] <= shared
    one.ask_until_stored()
    before = one.counters["load_tokens"]
    one.ask()
    is_replayed = family in ONLY_V2
    wanted = sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in one.prompts if not is_replayed or len(prompt) > 33)
    assert one.counters["load_tokens"] - before >= wanted - shared
    assert one.findings.wrong == [] and not one.counters["loads_failed"]
    assert not one.counters["load_window_unknown"]
    assert leaks(one.engine) == [] and server_leaks(one.engine, one.root) == []
    one.stop()
    one.engine = SimulatedEngine(one.setup)
    one.ask()
    assert one.counters["load_tokens"] >= wanted - shared
    assert one.findings.wrong == [] and leaks(one.engine) == []


WINDOWED = {"mla_windows": (0, 1, 3), "local": (1,)}


@pytest.mark.parametrize(("family", "layer"), [(f, layer) for f, layers in WINDOWED.items() for layer in layers])
def test_one_block_of_a_window_too_few_is_noticed(asked, family, layer):
    one = asked(family)
    one.ask()
    with load_leaves_one_block(one.group_of(layer)):
        one.ask()
    assert one.counters["loads"] > one.counters["loads_failed"]
    assert one.findings.wrong_tokens and one.findings.wrong_answers


@pytest.mark.parametrize("family", ["compressed", "mla_windows", "ring", "replayed"])
def test_wrong_bytes_in_a_compressed_page_are_noticed(asked, family):
    """Of each compressed layer by itself: its states are read, and not computed again."""
    compressed = [n for n, kind in enumerate(FAMILIES[family]) if kind.spec.tokens_per_state > 1]
    one = asked(family)
    one.ask()
    one.stop()
    assert change_stored_tokens(one.root, f"layers.{compressed[-1]}.")
    one.engine = SimulatedEngine(one.setup)
    one.ask()
    assert one.counters["loads"] > one.counters["loads_failed"]
    assert one.findings.wrong_tokens and one.findings.wrong_answers
    assert all(f"layers.{compressed[-1]}." in text for text in one.findings.wrong if "reads wrong KV" in text)


@pytest.mark.parametrize("family", ["mla_windows", "local", "local_short", "ring"])
def test_prompt_that_is_loaded_with_its_last_token_is_noticed(asked, family):
    """vLLM computes that token again, alone: a window or an attention chunk before it is gone, a ring is empty."""
    one = asked(family)
    one.ask()
    with prompts_loaded_whole():
        one.ask()
    assert one.counters["loads"] > one.counters["loads_failed"]
    assert one.findings.wrong_tokens and one.findings.wrong_answers


def test_window_that_is_neither_loaded_nor_replayed_is_noticed(asked):
    one = asked("replayed")
    one.ask()
    with loads_said_to_bring_all_groups(one.engine):
        one.ask()
    assert one.counters["loads"] > one.counters["loads_failed"]
    assert one.findings.wrong_tokens and one.findings.wrong_answers


def stored_layers(one):
    (worker, *_) = one.engine.workers
    return {int(page.layer.split(".")[2]): page for page in worker.connector._worker._join.pages}


@pytest.mark.parametrize(
    ("family", "left_out"), [("compressed", set()), ("ring", {1}), ("replayed", {0}), ("local_short", {1, 2, 3})]
)
def test_groups_that_no_hit_needs_are_left_out(asked, family, left_out):
    """Rings and replayed windows are no part of vLLM's prefix cache; of short attention chunks nothing is left over."""
    one = asked(family)
    assert set(range(len(FAMILIES[family]))) - stored_layers(one).keys() == left_out


def test_opaque_pages_say_how_many_tokens_a_state_has(asked):
    one = asked("compressed")
    pages = stored_layers(one)
    assert {n: page.tokens_per_state for n, page in pages.items()} == {0: 1, 1: 1, 2: 4, 3: 8, 4: 4}
    assert (pages[4].dtype, pages[4].shape) == ("U8", (1, 2, 24)), "without the padding behind each page"


def test_chunks_that_cut_attention_chunks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="chunk_tokens=32 attention_chunk_size=48"):
        Asked(tmp_path / "cache", "local", chunk_tokens=32)


def test_vllm_cannot_make_the_block_manager_of_sinks():
    """Why such models stay refused. Fails with the first vLLM that can: then they can be looked at."""
    spec = SinkFullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, head_size_v=8, sink_len=4
    )
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        get_manager_for_kv_cache_spec(
            spec,
            max_in_flight_tokens=8,
            max_model_len=64,
            block_pool=BlockPool(16, enable_caching=True, hash_block_size=4),
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=4,
            needs_kv_cache_zeroing=False,
        )
