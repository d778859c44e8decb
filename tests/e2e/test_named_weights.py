"""Engines share KV if and only if they loaded the same weights, whatever their directories are called and become.

Each test starts several real engines over one cache. Pairs that share hit, pairs that do not compute, with plain
vLLM's answer: what an engine computed with no cached token.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import wait_ended, wait_written
from tests.kit.vllm.cached_engine import CHUNK, TAIL, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, generate, random_prompt, running
from tiered_kv.vllm.identity import model_files as weights

pytestmark = pytest.mark.vllm

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROMPT = random_prompt(4000, 2 * CHUNK + TAIL)
HIT = 2 * CHUNK


def ask(model: Path, root: Path, **options: Any) -> Answer:
    """One prompt's answer by an engine of its own, when all it stored is on disk."""
    with cached_engine(model, root, **options) as engine:
        (answer,) = engine.ask(PROMPT)
        if answer.cached_tokens < HIT:
            wait_written(root)
    wait_ended(root)
    return answer


def trained_into(folder: Path, model: Path) -> Path:
    """A checkpoint as a training run writes it: files of its own."""
    return Path(shutil.copytree(model, folder))


def downloaded_into(folder: Path, model: Path) -> Path:
    """A checkpoint as the hub's cache lays it out: links to blobs beside the snapshots."""
    repository = next(parent for parent in folder.parents if parent.name.startswith("models--"))
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    for file in model.iterdir():
        blob = repository / "blobs" / f"{folder.name}-{file.name}"
        shutil.copyfile(file, blob)
        (folder / file.name).symlink_to(os.path.relpath(blob, folder))
    return folder


@pytest.mark.parametrize("put", [trained_into, downloaded_into])
def test_checkpoints_below_one_snapshot_never_share(
    tiny_model: Path, new_model: Path, tmp_path: Path, put: Callable[[Path, Path], Path]
) -> None:
    snapshot = tmp_path / "models--org--run" / "snapshots" / COMMIT
    first, second = put(snapshot / "checkpoint-500", tiny_model), put(snapshot / "checkpoint-1000", new_model)
    elsewhere = tmp_path / "elsewhere" / "models--org--run" / "snapshots" / COMMIT
    copy = put(elsewhere / "checkpoint-500", tiny_model)
    root = tmp_path / "cache"

    old, new, again = ask(first, root), ask(second, root), ask(copy, root)

    assert (old.cached_tokens, new.cached_tokens, again.cached_tokens) == (0, 0, HIT)
    assert_same(again, old)
    assert new.tokens != old.tokens, "both checkpoints answer alike: this test proves nothing"


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Do something after the model was loaded and before its weights are named, once."""
    from tiered_kv.vllm import worker

    real = worker.base_fields

    def at_that_moment(action: Callable[[], object]) -> None:
        def base_fields(*arguments: Any) -> Any:
            monkeypatch.setattr(worker, "base_fields", real)
            action()
            return real(*arguments)

        monkeypatch.setattr(worker, "base_fields", base_fields)

    return at_that_moment


def point(link: Path, target: Path) -> None:
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


def test_weights_that_a_link_leaves_while_vllm_loads_are_not_named(
    tiny_model: Path, new_model: Path, tmp_path: Path, turned: Callable[[Callable[[], object]], None]
) -> None:
    latest, root = tmp_path / "latest", tmp_path / "cache"
    point(latest, tiny_model)
    turned(lambda: point(latest, new_model))
    with cached_engine(latest, root, {"strict": False}) as engine:  # holds the old weights, and "latest" is the new
        old = [*engine.ask(PROMPT), *engine.ask(PROMPT)]
        took_part = engine.scheduler_side._client.is_ready
    assert [answer.cached_tokens for answer in old] == [0, 0]

    new, again = ask(latest, root), ask(latest, root)

    assert (new.cached_tokens, again.cached_tokens) == (0, HIT)
    assert not took_part
    assert_same(again, new)
    assert old[0].tokens != new.tokens, "both models answer alike: this test proves nothing"


def test_weights_replaced_in_place_while_vllm_loads_are_refused_by_name(
    tiny_model: Path, tmp_path: Path, turned: Callable[[Callable[[], object]], None]
) -> None:
    model = trained_into(tmp_path / "model", tiny_model)
    (file,) = model.glob("*.safetensors")
    at = file.stat()

    def rewrite() -> None:  # as rsync -t and tar do, with the old time
        file.write_bytes(file.read_bytes())
        os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))

    turned(rewrite)
    with pytest.raises(Exception, match=r"changed on disk after vLLM had begun to load them.*Set model_id"):
        ask(model, tmp_path / "cache")

    turned(rewrite)
    with cached_engine(model, tmp_path / "cache", {"model_id": "mine"}) as engine:
        assert engine.ask(PROMPT)[0].cached_tokens == 0
        assert engine.ask(PROMPT)[0].cached_tokens == HIT


def test_loader_that_reads_elsewhere_needs_a_name(tiny_model: Path, new_model: Path, tmp_path: Path) -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader("elsewhere")
    class Elsewhere(DefaultModelLoader):
        """Reads the weights of another directory than the model's, as tensorizer and streams do."""

        where = ""

        def __init__(self, load_config: Any) -> None:
            super().__init__(replace(load_config, load_format="safetensors"))

        def _prepare_weights(self, model_name_or_path: str, *args: Any, **kwargs: Any) -> Any:
            return super()._prepare_weights(self.where, *args, **kwargs)

    Elsewhere.where = str(new_model)
    root = tmp_path / "cache"
    with pytest.raises(Exception, match=r"Set model_id.*load_format=elsewhere named=auto"):
        ask(tiny_model, root, load_format="elsewhere")
    with running(new_model, enable_prefix_caching=False) as llm:
        (plain,) = generate(llm, [PROMPT])

    with cached_engine(tiny_model, root, {"strict": False}, load_format="elsewhere") as engine:
        answers = [*engine.ask(PROMPT), *engine.ask(PROMPT)]
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert_same(answers[0], plain)


def sharded_into(folder: Path, model: Path) -> None:
    """The state of this model's only rank as ``save_sharded_state`` writes it: with the tensors vLLM fuses and adds."""
    import torch
    from safetensors.torch import load_file, save_file

    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            found = [tensors.pop(name.replace(parts[0], part)) for part in parts]
            tensors[name.replace(parts[0], fused)] = torch.cat(found)
    for name in [name for name in tensors if name.endswith("qkv_proj.weight")]:
        for scale in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            tensors[name.replace("qkv_proj.weight", f"attn.{scale}")] = torch.tensor(1.0)
    save_file(tensors, folder / "model-rank-0-part-0.safetensors")


def test_a_sharded_state_is_named_by_its_files(tiny_model: Path, new_model: Path, tmp_path: Path) -> None:
    """vLLM lists these files for nobody; engines that loaded them had no cache, and a reason that was not theirs."""
    model, root = trained_into(tmp_path / "model", tiny_model), tmp_path / "cache"
    told = []
    for trained in (tiny_model, new_model, tiny_model):
        sharded_into(model, trained)
        told.append(ask(model, root, load_format="sharded_state"))

    old, new, again = told
    assert (old.cached_tokens, new.cached_tokens, again.cached_tokens) == (0, 0, HIT)
    assert_same(again, old)
    assert new.tokens != old.tokens, "both checkpoints answer alike: this test proves nothing"


def test_rows_of_trained_tokens_make_other_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is too large to be hashed completely, which is what the limit makes of this one."""
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(weights, "FULL_BYTES", 0)
    model, root = trained_into(tmp_path / "model", tiny_model), tmp_path / "cache"
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    for token in PROMPT[20:24]:
        embedding[token] = -embedding[token]
    save_file(tensors, file, metadata={"format": "pt"})

    old, new, again = ask(tiny_model, root), ask(model, root), ask(model, root)

    assert (old.cached_tokens, new.cached_tokens, again.cached_tokens) == (0, 0, HIT)
    assert_same(again, new)
    assert new.logprobs != old.logprobs, "both models answer alike: this test proves nothing"
