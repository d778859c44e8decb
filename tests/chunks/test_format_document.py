"""docs/format.md says what the code does: every table in it is compared with the constants."""

import re

import pytest

from tiered_kv.chunks import header as f
from tiered_kv.chunks.geometry import ALIGNMENT_BYTES
from tiered_kv.keys.extras import Embeds, Lora, Multimodal, Salt, encode
from tiered_kv.keys.namespace import FORMAT_VERSION, MAX_DEPTH, MAX_RECORD_BYTES, REQUIRED_FIELDS
from tiered_kv.tiers.disk.marker import CONTENT, MARKER_FILE


@pytest.fixture
def page(repository):
    return (repository / "docs" / "format.md").read_text(encoding="utf-8")


def table(page, *head):
    """Rows of the table with these column names, without code marks."""
    rows = page.split(f"| {' | '.join(head)} |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_metadata_table_has_the_offsets_of_the_code(page):
    rows = table(page, "Offset", "Size", "Name", "Meaning")
    documented = [(name, int(offset), int(size), meaning.partition(":")[0]) for offset, size, name, meaning in rows]
    assert documented == [(x.name, x.offset, x.width, x.kind) for x in f.FIELDS]
    assert f"The tensor table starts at offset {f.TABLE_OFFSET} with a comma." in page


def test_text_between_the_values_is_what_a_seal_writes(page):
    header = f.pack_metadata(bytes(16), 256, b',"_pad":{}}').decode("latin-1")
    between, start, end = re.search(
        r"exactly\n`(.*?)`; before the first `(.*?)`, after the last `(.*?)`\.", page
    ).groups()
    assert header[8 : f.FIELDS[0].offset] == start
    assert header[f.TABLE_OFFSET - 2 : f.TABLE_OFFSET + 1] == end
    for before, after in zip(f.FIELDS, f.FIELDS[1:], strict=False):
        assert header[before.offset + before.width : after.offset] == between.replace("<name>", after.name)


def test_the_marker_of_a_directory_is_written_as_documented(page):
    assert f"`{CONTENT.decode().rstrip(chr(10))}` and a line feed" in page
    assert f"| `{MARKER_FILE}` |" in page


def test_blob_table_has_the_offsets_of_the_code(page):
    rows = table(page, "Offset", "Size", "Meaning")
    assert [row[:2] for row in rows] == [
        ["0", str(f.LENGTH_BYTES)],
        [str(f.LENGTH_BYTES), f"header_bytes` - {f.LENGTH_BYTES}"],
        ["header_bytes", "payload_bytes"],
    ]


def test_limits_are_those_of_the_code(page):
    assert f"at most {f.MAX_HEADER_BYTES}." in page
    assert f"smallest multiple of {ALIGNMENT_BYTES}" in page
    assert f"first\n{f.PEEK_BYTES} bytes of a blob hold all of it" in page
    assert f"At most {MAX_RECORD_BYTES} bytes, nested at\nmost {MAX_DEPTH} deep" in page
    assert page.startswith(f"# Format, version {FORMAT_VERSION}\n")


def test_namespace_table_has_the_required_fields(page):
    assert tuple(row[0] for row in table(page, "Field", "What it says")) == REQUIRED_FIELDS


def test_extras_table_has_the_tags_of_the_code(page):
    tags = [int(row[0]) for row in table(page, "Tag", "Extra", "Payload")]
    assert tags == [encode([extra])[0] for extra in (Lora(""), Salt(""), Multimodal("", 0), Embeds(bytes(32)))]
