"""`tiered-kv explain`: which chunks of a prompt hit in a tier, and why the others miss."""

import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson, NamespaceOption, Settings, Uri, find_namespace, open_uri
from tiered_kv.cli.output import exit_codes, note, print_json, print_table, progress
from tiered_kv.cli.text import age_text
from tiered_kv.errors import ConfigError
from tiered_kv.ops.explain import ExplainReport
from tiered_kv.ops.explain import explain as explained
from tiered_kv.ops.prompts import read_tokens
from tiered_kv.ops.text import counted

TOKENS_BYTES_MAX = 256 << 20
VALUE_CHARS = 40
DOTS = "..."
BOUNDARIES_SHOWN = 20


@app.command(epilog=EXIT_CODES)
def explain(
    uri: Uri,
    tokens: Annotated[
        Path,
        typer.Option(
            help="Token ids of the prompt: a JSON list, what vLLM's /tokenize answers, or numbers separated by spaces, "
            "commas or new lines; - reads standard input.",
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
    of the identity in which it differs, such as text_config.rope_theta, max_model_len or the epoch that a reset
    retired.

    Of a model with recurrent layers a hit ends where a state of theirs is here, too; with a draft that has KV of its
    own it ends where vLLM's own would. How much an engine would be offered is said, why it is not more, and every
    boundary of the prompt at which a state, or a part of one, is here.

    Without --namespace the one with most of the prompt is explained, else the one used last; which one is said. Of what
    besides the tokens makes keys differ only the salt can be given: requests with a LoRA adapter, images or prompt
    embeddings have other keys, which only their engine knows. So have rows of vLLM's own offloading: their namespaces
    are left out, with a note.

    The tier is listed once, and the headers of hits are read; payloads are not (see verify). Nothing is changed. Token
    ids are never printed. A miss is no error: the exit code is 0.
    """
    with exit_codes():
        prompt = read_tokens(_read(tokens))
        with open_uri(uri, more) as storage:
            with progress("listing") as tick:
                content = storage.look(tick)
            wanted = find_namespace(content, namespace)
            with progress("reading headers") as tick:
                found = explained(storage, prompt, content, wanted=wanted, salt=salt, progress=tick)
        if as_json:
            print_json(found)
            return
        for text in found.notes:
            note(text)
        spaces = (blob for blob in content.blobs if blob.name.namespace.hex() == found.namespace)
        _show(found, max((blob.used_s for blob in spaces), default=0.0))


def _read(path: Path) -> str:
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


def _show(report: ExplainReport, used_s: float) -> None:
    """Print it; ``used_s`` is the last use of the explained namespace, 0 where it holds no chunk."""
    if report.chunk_tokens is None or report.prompt_chunks is None:
        if report.notes:
            print("Whether this prompt is here is not known: no namespace of the tier can be explained.")
        else:
            print("Nothing of this prompt is here: the tier holds no namespace.")
        print(f"\nMore: {report.see}")
        return
    print(f"namespace {report.namespace} ({report.chosen_by}; {_used(used_s)})")
    if report.is_retired:
        print("          retired: its epoch is over (a reset), so no engine that starts now uses it")
    prompt, hit = counted(report.prompt_tokens, "token"), counted(report.hit_chunks, "chunk")
    print(f"prompt    {prompt}: {counted(report.prompt_chunks, 'chunk')} of {report.chunk_tokens}")
    print(f"hit       {hit}, {report.hit_tokens} of {prompt}")
    if report.state_parts or report.draft or report.hit_tokens < report.here_tokens:
        print(f"why       {report.hit_text}")
    print()
    rows = [
        (
            f"{run.first}-{run.last}" if run.last > run.first else str(run.first),
            f"{run.first_token}..{run.last_token}",
            run.text,
        )
        for run in report.runs
    ]
    if rows:
        print_table("", ("chunks", "tokens", "what"), rows)
    if report.boundaries:
        print()
        shown = report.boundaries[:BOUNDARIES_SHOWN]
        print_table("States", ("after tokens", "what"), [(one.tokens, one.text) for one in shown])
        if len(report.boundaries) > len(shown):
            print(f"... and {len(report.boundaries) - len(shown)} before these: --json shows all")
    if report.tail_tokens:
        tail = "token is" if report.tail_tokens == 1 else f"{report.tail_tokens} tokens are"
        print(f"\nThe last {tail} no full chunk and never stored, but as a tail (tail_tokens).")
    if report.tail_hit_tokens:
        tail = counted(report.tail_hit_tokens, "token")
        print(f"\nBehind {counted(report.here_chunks, 'chunk')} a tail with {tail} more of the prompt is here.")
    for other in report.others:
        held = f"{counted(other.chunks, 'chunk')} of it ({counted(other.tokens, 'token')}; {_used(other.used_s)})"
        print(f"\nNamespace {other.namespace} has {held}.")
        fields = [(one.field, *_short(one.here, one.there), one.meaning) for one in other.differs]
        print_table("It differs in:", ("field", "here", "there", "meaning"), fields)
    if report.see:
        print(f"\nMore: {report.see}")


def _used(used_s: float) -> str:
    return f"last used {age_text(time.time() - used_s)} ago" if used_s else "it holds no chunk"


def _short(here: object, there: object) -> tuple[str, str]:
    """Two values as texts of a column's width, such that what differs can be seen."""
    one, other = (value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in (here, there))
    equal = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = 0 if equal < VALUE_CHARS - len(DOTS) else equal - VALUE_CHARS // 4
    return _cut(one, begin), _cut(other, begin)


def _cut(text: str, begin: int) -> str:
    if len(text) <= VALUE_CHARS:
        return text
    text = f"{DOTS}{text[begin:]}" if begin else text
    return text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - len(DOTS)]}{DOTS}"
