"""Leave out any one check between a key and the bytes it gives, and some test fails.

Each condition and each call for its own sake of the functions below is dropped in turn, and the tests that belong to
them run against what is left. The fields of the namespace are dropped in ``tests/vllm/test_identity_mutations.py``.
"""

from pathlib import Path

import pytest

from tests.kit.mutants import first_failure, mutants, recompiled
from tiered_kv.chunks import header
from tiered_kv.engine.performer import Performer
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.tiering.index import Index
from tiered_kv.tiers.disk import scan, tier

HERE = Path(__file__).parent

BLOBS = ("chunks/test_header.py",)
DISK = ("tiers/test_disk.py::namespace", "tiers/test_disk.py::broken_header")
HELD = (
    *(f"tiering/test_lookups.py::{about}" for about in ("prefix_is", "same_key", "another_namespace")),
    "tiering/test_failures.py::cannot_be_deleted",
    "tiering/test_stores.py::promised_to_nobody",
)
HELD_STATES = tuple(f"tiering/test_states.py::{about}" for about in ("state_anew", "same_key", "cannot_be_read"))
"""Whole, these files take thirty times as long."""

CHECKED = {
    "a blob against key, prefix and namespace": (header.BlobFormat, "verify", BLOBS),
    "what all blobs of a namespace share": (header, "_check_constant_part", BLOBS),
    "a header": (header, "_whole_header", BLOBS),
    "a header's hash": (header, "check_header_hash", BLOBS),
    "a format version": (header, "_check_version", BLOBS),
    "a blob of another version, size or namespace": (header.BlobFormat, "_refuse", BLOBS),
    "a header's fields": (header, "_match_metadata", BLOBS),
    "a payload": (header, "_check_payload", BLOBS),
    "a blob of any namespace": (header, "check_blob", BLOBS),
    "a blob of another size": (tier, "refuse_foreign", DISK),
    "a file against its name": (scan, "read_named_header", DISK),
    "what was read against the index": (Performer, "_read", ("engine/test_engine.py",)),
    "what the index holds": (Index, "held_prefix", HELD),
    "what the index holds of states": (Index, "held_state", HELD_STATES),
    "keys": (PrefixKeys, "extend", ("keys/test_golden_keys.py", "keys/test_prefix_keys.py")),
}


@pytest.mark.parametrize("name", CHECKED)
def test_no_check_can_be_left_out(monkeypatch, name):
    owner, attribute, files = CHECKED[name]
    original = getattr(owner, attribute)

    def noticed():
        return any(first_failure(HERE / file, about) for file, _, about in (name.partition("::") for name in files))

    monkeypatch.setattr(owner, attribute, recompiled(original))
    assert not noticed(), "the tests fail without a mutation"
    unnoticed = []
    for mutant in mutants(original):
        monkeypatch.setattr(owner, attribute, mutant.function)
        if not noticed():
            unnoticed.append(mutant.dropped)
    assert not unnoticed
