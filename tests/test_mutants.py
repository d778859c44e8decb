"""What decides whether a mutation run passes: reasons for survivors say what they cover, and nothing else."""

import re
from pathlib import Path

import pytest
from mutate import SECTIONS, Mutant, Reason, configuration, explain, read_reasons

BOUND = Mutant("m.x_f__mutmut_1", "tiered_kv.keys.tags.shared_tag", "if a > b:", "if a >= b:")
OTHER = Mutant("m.x_f__mutmut_2", "tiered_kv.keys.tags.shared_tag", "return b", "return None")


def test_a_survivor_without_a_reason_is_told_with_its_change() -> None:
    reason = Reason(r"tiered_kv\.keys\.tags\.shared_tag", "if a > b:", "if a >= b:", "the bound is no promise")
    used, without = explain([BOUND, OTHER], [reason])
    assert used == {"the bound is no promise": 1}
    assert without == ["tiered_kv.keys.tags.shared_tag: return b  ->  return None"]


@pytest.mark.parametrize(
    "reason",
    [
        Reason(r"tiered_kv\.keys\.tags", ".*", ".*", "another place"),
        Reason(".*", "if a", ".*", "a part of the line"),
        Reason(".*", ".*", "if a > b:", "another change of it"),
    ],
)
def test_a_reason_covers_a_whole_change_or_none(reason: Reason) -> None:
    assert explain([BOUND], [reason])[1] != []


def test_every_reason_names_code_that_is_there(repository: Path) -> None:
    for reason in read_reasons():
        assert reason.text.strip()
        if reason.where == ".*":
            continue
        where = re.sub(r"\\(.)", r"\1", reason.where).split(".")
        modules = [repository.joinpath(*where[:count]).with_suffix(".py") for count in range(2, len(where))]
        (module,) = [path for path in modules if path.is_file()]
        assert f"def {where[-1]}(" in module.read_text(), f"{reason.where} is gone: take its reason out, too"


def test_every_section_mutates_files_and_runs_tests_that_are_there(repository: Path) -> None:
    for section in SECTIONS:
        assert all(list(repository.glob(pattern)) for pattern in (*section.files, *section.tests, *section.without))
        assert "[tool.mutmut]" in configuration(section)
