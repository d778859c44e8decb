"""Write docs/pictures.md: what `tree`, `explain` and `top` look like, on a small cache made for it.

    python scripts/cli_pictures.py [FILE]

The cache is filled with prompts that share a beginning, of two models, and a small engine (tests/kit) stores and
loads through a real server while `top` watches. Figures differ from run to run; a test compares everything else.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.kit.server.clients import SmallEngine, settings  # noqa: E402
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens  # noqa: E402
from tiered_kv.ops.open import open_storage  # noqa: E402

SHOWN_AS = "/var/cache/tiered_kv"
COLUMNS = 110
ROUNDS = 400

HEAD = """# Pictures of the command line

Made by `python scripts/cli_pictures.py`; what the verbs do is told in [command-line.md](command-line.md).
"""


def picture(directory: Path, *words: str) -> str:
    """A command and what it prints, as a reader would see it."""
    command = [sys.executable, "-m", "tiered_kv.cli", *words]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=True)
    text = f"$ tiered-kv {' '.join(words)}\n{done.stdout.rstrip()}\n"
    return f"```text\n{text.replace(str(directory / 'cache'), SHOWN_AS)}```\n"


def fill(directory: Path) -> None:
    """Conversations that begin with one system prompt, beside those of a second model."""
    system = tokens(1, 8)
    (directory / "cache").mkdir()
    with open_storage(f"file://{directory}/cache") as storage:
        for turn in range(4):
            Model().store(storage, system + tokens(10 + turn, 2 + 3 * turn))
        Model().store(storage, system[: 5 * CHUNK] + tokens(30, 4))
        Model(weights="hf:fedcba9876543210fedcba9876543210fedcba98").store(storage, tokens(2, 6))
    (directory / "prompt.json").write_text(json.dumps(system + tokens(99, 2, tail=7)))


@contextmanager
def busy_engine(directory: Path) -> Iterator[None]:
    """An engine that stores and loads until the block ends."""
    engine, is_over = SmallEngine.start(settings(directory / "live")), threading.Event()

    def work() -> None:
        for number in range(ROUNDS):
            if is_over.is_set():
                return
            engine.store(8, first_token=number * 8 * 64)
            engine.wait_hits(8, number * 8 * 64)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()
        engine.close()


def page() -> str:
    """The whole document."""
    with tempfile.TemporaryDirectory(prefix="tkv-", dir="/tmp") as place:
        directory = Path(place)
        os.environ["XDG_RUNTIME_DIR"] = place
        fill(directory)
        uri = f"file://{directory}/cache"
        parts = [
            HEAD,
            "## tree\n",
            picture(directory, "tree", uri),
            "## explain\n",
            picture(directory, "explain", uri, "--tokens", "prompt.json"),
            "## top\n",
        ]
        with busy_engine(directory):
            live = picture(directory, "top", f"file://{directory}/live", "--once")
        parts.append(live.replace(f"{directory}/live", SHOWN_AS))
    return "\n".join(parts)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs" / "pictures.md"
    target.write_text(page())
    print(f"written: {target}")


if __name__ == "__main__":
    main()
