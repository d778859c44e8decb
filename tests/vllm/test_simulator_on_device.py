"""The simulator's scenarios with the copy engine of a device: vLLM's own order of calls, under both runners.

Which bytes go where is compared by the simulator for every token; races are for tests/chunks/test_device_copy.py.
"""

import pytest

from tests.kit.counts import count, seed
from tests.kit.gpu.immediate import copies_as_on_a_device
from tests.sim.vllm.scenario import Plan, run_scenario
from tiered_kv.vllm.worker import WorkerSide

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SEEDS = count("DEVICE_SEEDS", 4)


@pytest.mark.parametrize("number", range(seed(), seed() + SEEDS))
def test_seed_with_the_copies_of_a_device(number, tmp_path, monkeypatch, fake_cuda):
    began = []
    begin_step = WorkerSide.begin_step

    def noted(side, metadata):
        begin_step(side, metadata)
        began.append(side._begun is metadata and len(metadata.loads))

    monkeypatch.setattr(WorkerSide, "begin_step", noted)
    plan = Plan.draw(number, tmp_path / "cache", is_v2=bool(number & 1), is_async=bool(number & 2))
    registered = []
    register = fake_cuda.cuda.register
    monkeypatch.setattr(fake_cuda.cuda, "register", lambda *window: registered.append(window) or register(*window))
    with copies_as_on_a_device(direct_bytes=1 if number & 4 else 1 << 40, cuda=fake_cuda.cuda) as engines:
        outcome = run_scenario(plan, tmp_path / "cache")
    print(f"seed={number} {dict(outcome.counts)}")
    assert not outcome.wrong, "\n".join([f"seed={number}", repr(plan), *outcome.wrong])
    assert not outcome.counts["wrong_tokens"]
    assert engines and sum(lane.turns for engine in engines for lane in engine._lanes.values()) > 0
    assert began, "vLLM's runners call the hook"
    assert registered, "a worker pins with what its engine's device has"
    assert fake_cuda.registrations == 0, "a worker that ended left host memory registered"
