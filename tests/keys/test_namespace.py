import enum
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.samples.formats import namespace_fields, sample_namespace
from tiered_kv.errors import ConfigError
from tiered_kv.keys.namespace import (
    ABSENT,
    ADDED_FIELDS,
    MAX_DEPTH,
    MAX_RECORD_BYTES,
    REQUIRED_FIELDS,
    FieldDifference,
    Namespace,
    diff,
)

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(st.characters(), max_size=5))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def test_record_is_sorted_ascii_json_without_spaces():
    record = sample_namespace(weights="é").record
    assert record.startswith(b'{"attention_backend":"FLASH_ATTN","block_tokens":4,')
    assert b'"weights":"\\u00e9"' in record
    assert b" " not in record


def test_digest_is_the_start_of_the_records_sha256():
    namespace = sample_namespace()
    assert namespace.sha256 == hashlib.sha256(namespace.record).digest()
    assert namespace.digest == namespace.sha256[:16]


def test_fields_come_back_as_given():
    assert sample_namespace().fields == namespace_fields()


def test_order_of_fields_does_not_matter():
    fields = namespace_fields()
    assert Namespace.from_fields(dict(reversed(fields.items()))) == Namespace.from_fields(fields)


def test_tuple_is_written_as_a_list():
    assert sample_namespace(geometry=(1, 2)) == sample_namespace(geometry=[1, 2])


@given(values)
def test_stored_record_gives_the_same_namespace(value):
    namespace = sample_namespace(extra=value)
    assert Namespace.from_record(namespace.record) == namespace


@given(values, values)
def test_different_values_give_different_digests_and_a_difference(left, right):
    a, b = sample_namespace(extra=left), sample_namespace(extra=right)
    assert (a.digest == b.digest) == (json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True))
    assert (diff(a, b) == []) == (a == b)


@pytest.mark.parametrize("name", REQUIRED_FIELDS)
def test_every_required_field_is_missed_and_changes_the_digest(name):
    fields = namespace_fields()
    assert Namespace.from_fields(fields | {name: "another"}).digest != Namespace.from_fields(fields).digest
    del fields[name]
    with pytest.raises(ConfigError, match=f"missing={name}"):
        Namespace.from_fields(fields)


def test_record_of_an_earlier_version_is_read_without_the_fields_that_came_later():
    fields = {name: "x" for name in REQUIRED_FIELDS if name not in ADDED_FIELDS} | {"format_version": 2}
    record = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert Namespace.from_record(record).fields == fields
    for version in (max(ADDED_FIELDS.values()), True, None):
        newer = json.dumps(fields | {"format_version": version}, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(ConfigError, match="missing=vllm_version,kv_encoding,settings"):
            Namespace.from_record(newer)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, r"list or dict \(pass repr\(value\)\)\. field=extra observed=float$"),
        (complex(1), r"list or dict\. field=extra observed=complex$"),
        (-(2**63) - 1, r"at most 64 bits\. field=extra$"),
        ({"a": [0, float("nan")]}, r"field=extra\.a\[1\] observed=float"),
        ({1: 2}, r"keys must be strings. field=extra key=1"),
        ({1, 2}, r"observed=set"),
        (b"x", r"observed=bytes"),
        (2**64, r"at most 64 bits"),
        ([10**5000], r"at most 64 bits"),
        ("x" * MAX_RECORD_BYTES, r"too large"),
    ],
)
def test_value_that_is_not_exact_json_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        sample_namespace(extra=value)


def test_value_that_holds_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested too deep"):
        sample_namespace(extra=loop)


def test_enum_of_strings_is_written_as_its_value():
    class Kind(enum.StrEnum):
        A = "a"

    assert sample_namespace(extra=Kind.A) == sample_namespace(extra="a")


def nested(depth, inside):
    for _ in range(depth):
        inside = [inside]
    return inside


@pytest.mark.parametrize("value", [-(2**63), 2**64 - 1, nested(MAX_DEPTH - 1, 1), {"a": nested(MAX_DEPTH - 2, 1)}])
def test_limits_themselves_are_accepted(value):
    namespace = sample_namespace(extra=value)
    assert namespace.fields["extra"] == value
    assert Namespace.from_record(namespace.record) == namespace


@pytest.mark.parametrize("value", [nested(MAX_DEPTH, 1), {"a": nested(MAX_DEPTH - 1, 1)}])
def test_one_level_more_is_too_deep(value):
    with pytest.raises(ConfigError, match=f"limit={MAX_DEPTH} field=extra"):
        sample_namespace(extra=value)


def test_a_record_of_the_largest_size_is_written_and_read_and_none_larger():
    room = MAX_RECORD_BYTES - len(sample_namespace(extra="").record)
    namespace = sample_namespace(extra="x" * room)
    assert len(namespace.record) == MAX_RECORD_BYTES
    assert Namespace.from_record(namespace.record) == namespace
    with pytest.raises(ConfigError, match=f"too large. limit={MAX_RECORD_BYTES} observed={MAX_RECORD_BYTES + 1}$"):
        sample_namespace(extra="x" * (room + 1))


def test_every_missing_field_is_named():
    with pytest.raises(ConfigError, match="missing=tp,pp$"):
        Namespace.from_fields({name: value for name, value in namespace_fields().items() if name not in ("tp", "pp")})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"x" * (MAX_RECORD_BYTES + 1), f"too large. limit={MAX_RECORD_BYTES} observed={MAX_RECORD_BYTES + 1}$"),
        (b"{", "record is not JSON. reason=Expecting property name"),
        (b"[]", "record is not an object. observed=list$"),
        (sample_namespace().record + b" ", r"^namespace record is not canonical JSON \(order, spaces, escapes or a"),
    ],
)
def test_a_refused_record_says_what_was_observed(record, message):
    with pytest.raises(ConfigError, match=message):
        Namespace.from_record(record)


DAMAGES = {
    "empty": lambda record: b"",
    "truncated": lambda record: record[:-1],
    "trailing space": lambda record: record + b" ",
    "a list": lambda record: b"[]",
    "deep nesting": lambda record: b"[" * 100_000,
    "not unicode": lambda record: b"\xff" + record,
    "byte order mark": lambda record: b"\xef\xbb\xbf" + record,
    "a float": lambda record: record.replace(b'"tp":1', b'"tp":1.0'),
    "NaN": lambda record: record.replace(b'"tp":1', b'"tp":NaN'),
    "infinity": lambda record: record.replace(b'"tp":1', b'"tp":1e999'),
    "huge integer": lambda record: record.replace(b'"tp":1', b'"tp":' + b"9" * 5000),
    "inner space": lambda record: record.replace(b'"tp":1', b'"tp": 1'),
    "repeated key": lambda record: record.replace(b'"tp":1', b'"tp":2,"tp":1'),
    "missing field": lambda record: record.replace(b',"tp":1', b""),
    "needless escape": lambda record: record.replace(b'"v1"', b'"\\u00761"'),
    "too large": lambda record: record.ljust(MAX_RECORD_BYTES + 1),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_record_is_a_config_error(name):
    record = sample_namespace().record
    damaged = DAMAGES[name](record)
    assert damaged != record
    with pytest.raises(ConfigError):
        Namespace.from_record(damaged)


def test_difference_names_path_and_both_values():
    a = sample_namespace(text_config={"rope_theta": "10000.0", "layers": [1, 2]}, tp=1)
    b = sample_namespace(text_config={"rope_theta": "500000.0", "layers": [1]}, tp=2)
    assert diff(a, b) == [
        FieldDifference("text_config.layers[1]", 2, ABSENT),
        FieldDifference("text_config.rope_theta", "10000.0", "500000.0"),
        FieldDifference("tp", 1, 2),
    ]


def test_what_only_the_right_side_has_is_absent_on_the_left():
    assert diff(sample_namespace(), sample_namespace(extra=1)) == [FieldDifference("extra", ABSENT, 1)]


def test_a_list_and_a_dict_at_one_path_are_told_by_position_first_and_name_then():
    found = diff(sample_namespace(extra=[1, 2]), sample_namespace(extra={"a": 1}))
    assert [difference.path for difference in found] == ["extra[0]", "extra[1]", "extra.a"]


def test_difference_tells_true_from_one_and_absent_from_its_text():
    assert diff(sample_namespace(extra=True), sample_namespace(extra=1)) == [FieldDifference("extra", True, 1)]
    assert diff(sample_namespace(extra=ABSENT), sample_namespace()) == [FieldDifference("extra", ABSENT, ABSENT)]


def test_difference_tells_a_dotted_name_from_nesting():
    assert len(diff(sample_namespace(extra={"a.b": 1}), sample_namespace(extra={"a": {"b": 1}}))) == 2


def test_difference_tells_an_empty_list_from_an_empty_dict():
    assert diff(sample_namespace(extra=[]), sample_namespace(extra={})) == [FieldDifference("extra", [], {})]
