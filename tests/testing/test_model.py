"""The model the end-to-end tests stand on: the same weights every time, written whole or not at all."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from tiered_kv.testing.model import DEMO, TINY, ModelShape, build_model

SMALL = ModelShape(
    layers=1, hidden=32, intermediate=64, heads=2, kv_heads=1, head_dim=16, vocab=64, weight_std=0.2, head_std=0.2
)


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first = build_model(tmp_path / "a", seed=7, shape=SMALL)
    assert weights(first) == weights(build_model(tmp_path / "b", seed=7, shape=SMALL))
    assert weights(first) != weights(build_model(tmp_path / "c", seed=8, shape=SMALL))


def test_a_built_model_is_left_alone(tmp_path: Path) -> None:
    path = build_model(tmp_path, shape=SMALL)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert build_model(tmp_path, shape=SMALL) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("other", [{"seed": 1, "shape": SMALL}, {"shape": TINY}])
def test_other_parameters_replace_the_model(tmp_path: Path, other: dict) -> None:
    before = weights(build_model(tmp_path, shape=SMALL))
    assert weights(build_model(tmp_path, **other)) != before


def test_an_interrupted_build_is_built_again(tmp_path: Path) -> None:
    whole = weights(build_model(tmp_path, shape=SMALL))
    (tmp_path / "tiered_kv_model.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert weights(build_model(tmp_path, shape=SMALL)) == whole


def test_the_files_say_what_the_shape_says(tmp_path: Path) -> None:
    build_model(tmp_path, shape=TINY)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == TINY.layers and config["vocab_size"] == TINY.vocab
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    assert sum(rows * (columns[0] if columns else 1) for rows, *columns in sizes.values()) == TINY.parameters
    assert len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]) == TINY.vocab


def test_the_demo_model_is_big_enough_to_feel_and_cheap_to_cache() -> None:
    assert 100_000_000 <= DEMO.parameters <= 200_000_000
    assert DEMO.kv_bytes_per_token == 12 * 1024
