"""docs/models.md: every family has a state, and a test that is there shows it."""

import re
from pathlib import Path

import pytest

STATES = ("proven", "simulated", "not run", "refused")
FAMILIES = {
    *(
        "Llama 3",
        "Llama 4",
        "Qwen3",
        "Qwen3-Next",
        "Qwen3.5",
        "Qwen 4",
        "gpt-oss",
        "Gemma 3",
        "Gemma 4",
        "Mistral 7B v0.1",
    ),
    *(
        "DeepSeek V2",
        "DeepSeek V3.2",
        "DeepSeek V4",
        "Kimi K2",
        "Kimi-Linear",
        "Kimi K3",
        "GLM 4.5",
        "GLM 5",
        "GLM 5.3 Flash",
    ),
    *(
        "MiniMax M2",
        "MiniMax M3",
        "Hy3",
        "Hy 4",
        "Step 3.5",
        "Inkling",
        "MiMo",
        "MiMo V2",
        "Laguna",
        "Muse Glimmer",
        "dots3",
    ),
    *(
        "Nemotron-H",
        "Nemotron 3",
        "Granite 4",
        "Falcon-H1",
        "Ling 2.6",
        "Ring 2.6",
        "Ling 3.0",
        "Intern-S2",
        "LFM2",
        "LFM2.5",
    ),
    *("MiniCPM-V 4.6", "Plamo 3"),
}
"""Of vLLM's recipe book, those that its own recipes name as families; more may have a row."""


@pytest.fixture
def rows(repository: Path) -> list[list[str]]:
    """The cells of the table of families."""
    text = (repository / "docs" / "models.md").read_text().partition("\n## Families\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def test_every_family_has_one_row(rows: list[list[str]]) -> None:
    named = [name.strip() for row in rows for name in re.split(r", | and |; | to ", row[0])]
    assert {name for name in FAMILIES if named.count(name) != 1} == set()


def test_every_row_says_how_far_it_is_and_names_a_test_that_is_there(repository: Path, rows: list[list[str]]) -> None:
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 5, row
        assert row[2].startswith(STATES), row[2]
        named = re.findall(r"`(tests/[a-z0-9_/]+\.py)(?:::([a-z0-9_]+))?`", row[3])
        assert named, f"no test is named: {row[0]}"
        for file, function in [*named, *re.findall(r"`(tests/[a-z0-9_/]+\.py)(?:::([a-z0-9_]+))?`", row[4])]:
            source = (repository / file).read_text()
            assert not function or f"def {function}(" in source, f"{file} has no {function}"


def test_what_is_proven_is_shown_by_an_engine_and_what_is_simulated_by_none(rows: list[list[str]]) -> None:
    for family, _, state, shown, drafts in rows:
        if state.startswith("proven"):
            assert "`tests/e2e/" in shown, family
        if state.startswith("simulated"):
            assert "test_simulator" in shown, family
        assert not drafts.startswith("proven") or "`tests/e2e/" in drafts + shown, family


def test_models_that_are_proven_are_built(repository: Path, rows: list[list[str]]) -> None:
    """A family that is called proven by its own name has a small model, or is of a kind that the tests name."""
    built = (repository / "tests" / "kit" / "vllm" / "tiny_models.py").read_text()
    for name, builder in {
        "Qwen3-Next": "qwen3_next",
        "Granite 4": "granite4",
        "Gemma 3": "gemma3",
        "gpt-oss": "gpt_oss",
        "Mistral 7B v0.1": "mistral",
        "DeepSeek V2": "deepseek_v2",
    }.items():
        (row,) = [row for row in rows if name in re.split(r", | and ", row[0])]
        assert row[2].startswith("proven") and f"def _{builder}(" in built, name
