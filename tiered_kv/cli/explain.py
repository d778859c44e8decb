"""`tiered-kv explain`: why a prompt is a hit in a tier, chunk by chunk, or where it stops being one."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tiered_kv.admin.words import counted
from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson, NamespaceOption, Uri, find_namespace, open_uri
from tiered_kv.cli.output import Report, age_text, exit_codes, note, print_json, print_table, progress
from tiered_kv.cli.settings import Settings

if TYPE_CHECKING:
    from tiered_kv.admin.explain import Candidate, Explanation

TOKENS_BYTES_MAX = 256 << 20
VALUE_CHARS = 40


class ChunkRun(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring chunks of the prompt of which the same can be said.

    Attributes:
        first: Position of the first chunk, from 0.
        last: Position of the last chunk, included.
        first_token: Position of the first token.
        last_token: Position of the last token, included.
        state: ``here``; ``missing``: not stored; ``unreachable``: stored behind one that is not; ``damaged``;
            ``foreign``: of another namespace or format version; ``collision``: the key is taken by other tokens.
        text: The same in words, with the reason.
    """

    first: int
    last: int
    first_token: int
    last_token: int
    state: str
    text: str


class IdentityDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A field in which another namespace differs from the explained one.

    Attributes:
        field: Path in the namespace's record, e.g. ``text_config.rope_theta``.
        here: Value in the explained namespace, any JSON; null for all of the geometry.
        there: Value in the other one.
        meaning: What the field means, if that is not plain; else empty.
    """

    field: str
    here: Any
    there: Any
    meaning: str


class OtherNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """Another namespace of the tier that has some of the prompt.

    Attributes:
        namespace: Digest.
        chunks: Leading chunks of the prompt that are stored there.
        tokens: The same in tokens.
        used_s: When any chunk of it was used last.
        is_retired: Whether ``reset_cache`` retired its epoch, as far as the tier knows.
        differs: What keeps an engine of the explained namespace from using it; at most 50 fields.
    """

    namespace: str
    chunks: int
    tokens: int
    used_s: float
    is_retired: bool
    differs: list[IdentityDifference]


class ExplainReport(Report, frozen=True, kw_only=True):
    """What ``explain`` finds of one prompt.

    Attributes:
        uri: The tier.
        namespace: The namespace that is explained; null where no namespace has a record that can be read.
        chosen_by: Why this one, in words.
        is_retired: Whether ``reset_cache`` retired its epoch, as far as the tier knows; null without a namespace.
        prompt_tokens: Tokens in the file.
        chunk_tokens: Tokens of a chunk.
        prompt_chunks: Full chunks of the prompt.
        tail_tokens: Tokens behind the last full chunk, which are never stored.
        hit_chunks: Leading chunks that an engine would get from this tier.
        hit_tokens: The same in tokens.
        siblings: Chunks of other prompts at the position of the first miss, continuing the same prefix; null without a
            miss.
        runs: The prompt, chunk by chunk.
        others: Other namespaces with some of the prompt, the longest part first.
        notes: What may make the answer incomplete.
        see: Where the documentation tells what to do about a miss; null without one.
    """

    uri: str
    namespace: str | None
    chosen_by: str
    is_retired: bool | None
    prompt_tokens: int
    chunk_tokens: int | None
    prompt_chunks: int | None
    tail_tokens: int | None
    hit_chunks: int
    hit_tokens: int
    siblings: int | None
    runs: list[ChunkRun]
    others: list[OtherNamespace]
    notes: list[str]
    see: str | None


@app.command(epilog=EXIT_CODES)
def explain(
    uri: Uri,
    tokens: Annotated[
        Path,
        typer.Option(
            help="Token ids of the prompt: a JSON list, or numbers separated by spaces, commas or new lines; - reads "
            "standard input.",
            show_default=False,
        ),
    ],
    namespace: NamespaceOption = None,
    salt: Annotated[str, typer.Option(help="The request's cache_salt, if it had one.", show_default=False)] = "",
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say why a prompt is a hit in this tier, or where and why it stops being one.

    Every full chunk of the prompt is here, or the reason why not is named: not stored, removed, damaged, or the prompt
    diverges from others at this chunk. Where another namespace of the tier has the prompt, it is named with the fields
    of the identity in which it differs, such as text_config.rope_theta, max_model_len or the epoch that a reset_cache
    retired.

    Without --namespace the one with most of the prompt is explained, else the one used last; which one is said. Of what
    besides the tokens makes keys differ only the salt can be given: requests with a LoRA adapter, images or prompt
    embeddings have other keys, which only their engine knows.

    The tier is listed once, and the headers of hits are read; payloads are not (see verify). Nothing is changed. Token
    ids are never printed. A miss is no error: the exit code is 0.
    """
    with exit_codes():
        from tiered_kv.admin.explain import explain as explained
        from tiered_kv.admin.prompts import read_tokens

        prompt = read_tokens(_read(tokens))
        with open_uri(uri, more) as storage:
            with progress("listing") as tick:
                content = storage.look(tick)
            wanted = find_namespace(content, namespace)
            with progress("reading headers") as tick:
                found = explained(storage, prompt, content, wanted=wanted, salt=salt, progress=tick)
            if as_json:
                print_json(_report(storage.uri, found))
                return
            for text in found.notes:
                note(text)
            _show(found)


def _read(path: Path) -> str:
    from tiered_kv.errors import ConfigError

    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(TOKENS_BYTES_MAX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(TOKENS_BYTES_MAX + 1)
        text = data.decode()
    except OSError as exc:
        raise ConfigError(f"option --tokens: {path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"option --tokens: {path} is no text file; expected token ids as text") from exc
    if len(data) > TOKENS_BYTES_MAX:
        raise ConfigError(f"option --tokens: {path} is larger than {TOKENS_BYTES_MAX} bytes")
    return text


def _report(uri: str, found: "Explanation") -> ExplainReport:
    chosen = found.chosen
    size = chosen.chunk_tokens if chosen else 0
    return ExplainReport(
        uri=uri,
        namespace=chosen.namespace.digest.hex() if chosen else None,
        chosen_by=found.reason,
        is_retired=chosen.is_retired if chosen else None,
        prompt_tokens=found.token_count,
        chunk_tokens=size or None,
        prompt_chunks=found.chunk_count if chosen else None,
        tail_tokens=found.tail_tokens if chosen else None,
        hit_chunks=found.hit_chunks,
        hit_tokens=found.hit_chunks * size,
        siblings=found.siblings,
        runs=[
            ChunkRun(
                first=run.first,
                last=run.last,
                first_token=run.first * size,
                last_token=(run.last + 1) * size - 1,
                state=run.state.value,
                text=run.text,
            )
            for run in found.runs
        ],
        others=[_other(chosen, other) for other in found.others] if chosen else [],
        notes=found.notes,
        see=_see(found),
    )


def _see(found: "Explanation") -> str | None:
    from tiered_kv.admin.findings import NO_HITS

    return None if found.chosen is not None and 0 < found.chunk_count == found.hit_chunks else NO_HITS


def _other(chosen: "Candidate", other: "Candidate") -> OtherNamespace:
    from tiered_kv.admin.explain import differences, meaning

    return OtherNamespace(
        namespace=other.namespace.digest.hex(),
        chunks=other.hits,
        tokens=other.hit_tokens,
        used_s=other.used_s,
        is_retired=other.is_retired,
        differs=[
            IdentityDifference(
                field=one.path,
                here=one.left,
                there=one.right,
                meaning=meaning(one.path, other, chosen),
            )
            for one in differences(chosen.namespace, other.namespace)
        ],
    )


def _show(found: "Explanation") -> None:
    chosen = found.chosen
    if chosen is None:
        print("Nothing of this prompt is here: the tier holds no namespace with a record that can be read.")
        print(f"\nMore: {_see(found)}")
        return
    size = chosen.chunk_tokens
    print(f"namespace {chosen.namespace.digest.hex()} ({found.reason}; {_used(chosen)})")
    if chosen.is_retired:
        print("          retired: its epoch is over (reset_cache), so no engine that starts now uses it")
    prompt, hit = counted(found.token_count, "token"), counted(found.hit_chunks, "chunk")
    print(f"prompt    {prompt}: {counted(found.chunk_count, 'chunk')} of {size}")
    print(f"hit       {hit}, {found.hit_chunks * size} of {prompt}\n")
    rows = [
        (
            f"{run.first}-{run.last}" if run.last > run.first else str(run.first),
            f"{run.first * size}..{(run.last + 1) * size - 1}",
            run.text,
        )
        for run in found.runs
    ]
    if rows:
        print_table("", ("chunks", "tokens", "what"), rows)
    if found.tail_tokens:
        print(f"\nThe last {_count(found.tail_tokens)} no full chunk and never stored.")
    for other in found.others:
        _show_other(chosen, other)
    if see := _see(found):
        print(f"\nMore: {see}")


def _count(tokens: int) -> str:
    return "token is" if tokens == 1 else f"{tokens} tokens are"


def _used(one: "Candidate") -> str:
    return f"last used {age_text(time.time() - one.used_s)} ago" if one.used_s else "it holds no chunk"


def _show_other(chosen: "Candidate", other: "Candidate") -> None:
    shown = _other(chosen, other)
    held = f"{counted(shown.chunks, 'chunk')} of it ({counted(shown.tokens, 'token')}; {_used(other)})"
    print(f"\nNamespace {shown.namespace} has {held}.")
    rows = [(one.field, _short(one.here), _short(one.there), one.meaning) for one in shown.differs]
    print_table("It differs in:", ("field", "here", "there", "meaning"), rows)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 3]}..."
