"""Change the package's code in thousands of small ways and see whether a test fails: mutmut, section by section.

A mutant that no test notices (a survivor) is a sentence of the code that nothing holds. Each gets a test, or a reason
in docs/proofs/mutants.toml why no test could notice it, or need; a survivor that has neither fails the run. mutmut
keeps what it did, so an interrupted run goes on where it stopped, and a change of one function runs that function's
mutants anew. What came out goes into docs/proofs/mutations.json.

The sources are copied to build/mutate/<section> and mutated there. Tests that start engines, take seconds or need an S3
server are left out: a mutant costs about half a second.

Usage: python scripts/mutate.py [--share 0.1 --seed 1] [--report] [SECTION ...]
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prove import PROOFS, ROOT, git, is_dirty, machine

WORK = ROOT / "build" / "mutate"
RESULTS = PROOFS / "mutations.json"
REASONS = PROOFS / "mutants.toml"
COPIED = (
    *("benchmarks", "demo", "deploy", "docs", "requirements", "scripts", "tools"),
    *("CHANGELOG.md", "Makefile", "README.md"),
)
"""What tests read besides themselves and the package."""

UNTRIED = "not checked"
NO_TESTS = "no tests"
"""Of functions that no test of the section calls; tests of other sections may."""
NOTICED = ("killed", "timeout", "segfault", "caught by type check")
UNNOTICED = ("survived", "suspicious")


@dataclass(frozen=True, slots=True)
class Section:
    """Files that are mutated, and the tests that should notice.

    Attributes:
        without: Files of it that are left out.
        left_out: Tests that take no part: whatever reaches much code runs them, and a survivor runs them all; or they
            read the package's source, which is another one there.
    """

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: {"TIERED_KV_EXAMPLES": "6"})


SECTIONS = (
    Section("keys", ("tiered_kv/keys/*.py",), ("tests/keys",)),
    Section(
        "tiering",
        ("tiered_kv/tiering/*.py",),
        ("tests/tiering",),  # its own alone: with those of the engine a survivor would take minutes
        left_out=tuple(
            f"tests/tiering/test_quotas.py::test_{name}"
            for name in (
                "minima_are_of_the_memory_that_the_machine_gives",
                "a_slot_size_in_use_keeps_one_slab_whatever_others_keep",
                "three_slot_sizes_share_what_two_of_them_nearly_keep",
                "without_a_minimum_two_slot_sizes_share_memory_equally",
                "a_slot_size_below_what_it_keeps_gets_memory_of_one_that_has_more",
                "engines_of_one_model_hold_no_more_empty_slots_together_than_their_share_allows",
            )
        ),
        environment={"TIERED_KV_EXAMPLES": "6", "TIERED_KV_SEEDS": "2"},
    ),
    Section(
        "engine",
        ("tiered_kv/engine/*.py",),
        ("tests/engine",),
        left_out=("tests/engine/test_cache_simulation.py",),
    ),
    Section(
        "vllm",
        ("tiered_kv/vllm/*.py", "tiered_kv/vllm/identity/*.py"),
        ("tests/vllm",),
        left_out=(
            "tests/vllm/test_api_drift.py::test_no_method_of_ours_is_unknown_to_all_versions_and_no_excuse_is_stale",
            "tests/vllm/test_compat.py::test_every_name_asked_for_as_text_has_a_row_or_a_reason",
            "tests/vllm/test_compat.py::test_the_table_has_no_row_twice_and_hooks_are_our_methods",
            "tests/vllm/test_identity_mutations.py::test_no_kind_of_extra_can_be_left_out",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why mutants that do this need no test: ``where`` (module, function) and both sides of the change as patterns."""

    where: str
    before: str
    after: str
    text: str

    def covers(self, mutant: "Mutant") -> bool:
        return all(
            re.fullmatch(pattern, said)
            for pattern, said in ((self.where, mutant.where), (self.before, mutant.before), (self.after, mutant.after))
        )


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one function. ``where`` holds over runs, ``name`` only until the function changes."""

    name: str
    where: str
    before: str
    after: str


def prepare(section: Section) -> None:
    """Bring build/mutate/<section> up to date with the working tree; what mutmut remembers there stays."""
    place = WORK / section.name
    place.mkdir(parents=True, exist_ok=True)
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for path in listed:
        source, target = ROOT / path, place / path
        if not source.is_file() or path == "pyproject.toml":
            continue
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for found in [path for top in ("tiered_kv", "tests") for path in (place / top).rglob("*.py")]:
        if str(found.relative_to(place)) not in listed:
            found.unlink()
    (place / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + configuration(section))


def configuration(section: Section) -> str:
    """mutmut's own settings, as TOML; a JSON list of strings is one of TOML, too."""
    values = {
        "source_paths": ["tiered_kv"],
        "only_mutate": list(section.files),
        "do_not_mutate": list(section.without),
        "also_copy": list(COPIED),
        # Examples drawn from one seed: a mutant that dies must die again. No stacks: a mutant may hang.
        "pytest_add_cli_args": [
            *("--hypothesis-seed=0", "-m", "not vllm and not slow and not s3"),
            *("-o", "faulthandler_timeout=0", "--timeout=1800"),
            *(f"--deselect={test}" for test in section.left_out),
        ],
        "pytest_add_cli_args_test_selection": list(section.tests),
        "process_isolation": "forkserver",  # torch and threads: no test has run in the process that forks
        "use_setproctitle": False,
        "track_dependencies": False,  # makes the first run of the tests ten times slower
    }
    return "\n[tool.mutmut]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def mutmut(place: Path, *arguments: str, section: Section, is_quiet: bool = True, stops: str | None = None) -> str:
    """Run a command of mutmut's; what it said, if it is quiet. ``stops``: it must fail, saying this.

    Raises:
        SystemExit: It failed, or did not fail so.
    """
    environment = os.environ | section.environment
    environment.pop("PYTHONPATH", None)  # or tests would import the package that is not mutated
    done = subprocess.run(
        (sys.executable, "-m", "mutmut", *arguments),
        cwd=place,
        env=environment,
        text=True,
        stdout=subprocess.PIPE if is_quiet else None,
        stderr=subprocess.STDOUT if is_quiet else None,
        check=False,
    )
    if done.returncode if stops is None else stops not in done.stdout:
        raise SystemExit(f"mutmut {arguments[0]} failed in {place}: {(done.stdout or 'see above')[-2000:]}")
    return done.stdout or ""


def outcomes(place: Path, section: Section) -> dict[str, str]:
    """What is known of every mutant, by its name."""
    lines = mutmut(place, "results", "--all", "true", section=section).splitlines()
    return dict(line.strip().rsplit(": ", 1) for line in lines if ": " in line)


def describe(place: Path, section: Section, name: str) -> Mutant:
    """The change, as one line before and one after."""
    lines = mutmut(place, "show", name, section=section).splitlines()
    before = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    after = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    module, _, mangled = function_of(name).rpartition(".")
    where = f"{module}.{mangled.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"
    return Mutant(name, where, " ".join(before), " ".join(after))


def read_reasons() -> list[Reason]:
    """docs/proofs/mutants.toml: ``[[mutant]]`` with where, before, after (patterns; none matches all) and reason."""
    found = tomllib.loads(REASONS.read_text())["mutant"]
    return [Reason(one["where"], one.get("before", ".*"), one.get("after", ".*"), one["reason"]) for one in found]


def run(section: Section, share: float, seed: int, *, is_report: bool) -> dict[str, Any]:
    """Run one section, or only read what its last run left, and say what came out."""
    started = time.monotonic()
    place = WORK / section.name
    if not is_report:
        prepare(section)
        # A run of a mutant that does not exist makes all of them, finds out which tests reach which, and stops.
        mutmut(place, "run", "--max-children", "1", "no.such__mutmut_0*", section=section, stops="nothing matches")
        known = outcomes(place, section)
        reached = sorted(name for name in known if function_of(name) in reached_functions(place))
        drawn = random.Random(seed).sample(reached, max(1, int(share * len(reached)))) if share < 1 else reached
        # What a test noticed stays noticed until its function changes; a survivor may have a test by now.
        if todo := [name for name in drawn if known[name] not in NOTICED]:
            mutmut(place, "run", "--max-children", "1", *todo, section=section, is_quiet=False)
    return judge(section, place, outcomes(place, section)) | {
        "share": share,
        "seed": seed if share < 1 else None,
        "seconds": round(time.monotonic() - started),
    }


def function_of(name: str) -> str:
    """A mutant's function, as mutmut writes it."""
    return name.partition("__mutmut_")[0]


def reached_functions(place: Path) -> set[str]:
    """Functions that any test of the section calls, as mutmut writes them."""
    stats = json.loads((place / "mutants" / "mutmut-stats.json").read_text())
    return {name for name, tests in stats["tests_by_mangled_function_name"].items() if tests}


def judge(section: Section, place: Path, found: dict[str, str]) -> dict[str, Any]:
    """Count, and find a reason for every survivor."""
    reached = reached_functions(place)
    survivors = [describe(place, section, name) for name, state in sorted(found.items()) if state in UNNOTICED]
    used, without_reason = explain(survivors, read_reasons())
    states: dict[str, int] = {}
    for name, state in found.items():
        state = state if state != UNTRIED or function_of(name) in reached else NO_TESTS
        states[state] = states.get(state, 0) + 1
    return {
        "files": list(section.files),
        "mutants": len(found),
        "tried": len(found) - states.get(UNTRIED, 0) - states.get(NO_TESTS, 0),
        "states": dict(sorted(states.items())),
        "noticed": sum(states.get(state, 0) for state in NOTICED),
        "with_reason": dict(sorted(used.items())),
        "without_reason": without_reason,
    }


def explain(survivors: Iterable[Mutant], reasons: Sequence[Reason]) -> tuple[dict[str, int], list[str]]:
    """How often each reason was needed, and the survivors that have none."""
    used: dict[str, int] = {}
    without: list[str] = []
    for mutant in survivors:
        reason = next((one for one in reasons if one.covers(mutant)), None)
        if reason is None:
            without.append(f"{mutant.where}: {mutant.before}  ->  {mutant.after}")
        else:
            used[reason.text] = used.get(reason.text, 0) + 1
    return used, without


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="default: all")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants of a section, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="judge what the last runs left and run nothing")
    options = parser.parse_args()
    known = {section.name: section for section in SECTIONS}
    if unknown := set(options.sections) - known.keys():
        parser.error(f"unknown sections {sorted(unknown)}; known: {', '.join(known)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    is_missed = False
    for name in options.sections or known:
        commit, was_dirty = git("rev-parse", "HEAD"), is_dirty()  # of the sources that are copied now
        result = run(known[name], options.share, options.seed, is_report=options.report)
        results[name] = {
            "commit": commit,
            "is_dirty": was_dirty,
            "mutmut": version("mutmut"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
        } | result
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        missed = result["without_reason"]
        print(f"{name}: {result['tried']} of {result['mutants']} tried, {result['noticed']} noticed, ", end="")
        print(f"{sum(result['with_reason'].values())} with a reason, {len(missed)} without")
        print("".join(f"  {line}\n" for line in missed), end="")
        is_missed |= bool(missed)
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
