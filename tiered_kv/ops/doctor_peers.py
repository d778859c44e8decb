"""Check what machines need to read from each other: the fleet's key, the own door, and every peer.

Asks each peer how much it has of a prefix that nobody has: an answer means that it is there, that its certificate is
the fleet's and that it takes this machine's token. The key itself is never shown.
"""

import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from tiered_kv.config import BUCKETS_PEERS, PEERS_MAX, Config, parse_address
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import NAME_BYTES, BlobName
from tiered_kv.ops.doctor_server import Running
from tiered_kv.ops.findings import DoctorFinding, error, ok, warning
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.tiers.object.store import ObjectStore

if TYPE_CHECKING:
    from tiered_kv.tiers.peers.fleet_key import FleetKey

ASK_S: Final = 2.0
EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where the own door is asked that listens at every address."""

NOBODYS: Final = BlobName(SELF_TEST_NAMESPACE, bytes(NAME_BYTES))


def check_peers(config: Config, running: Running) -> list[DoctorFinding]:
    """Run the checks; nothing where no setting of peers is used."""
    if config.peer_key_file is None:
        return []
    try:
        from tiered_kv.tiers.peers.fleet_key import FleetKey  # noqa: PLC0415 - its packages are an extra
    except ImportError as exc:
        text = f"peers needs more packages ({exc})"
        return [error("peers", text, "pip install cryptography h11 where the engines run")]
    try:
        key = FleetKey.read(config.peer_key_file)
    except ConfigError as exc:
        text, _, hint = str(exc).removeprefix("setting peer_key_file: ").partition("; ")
        return [error("peer key", text, hint or "it is for its owner alone: chmod 0600")]
    findings = [ok("peer key", f"{config.peer_key_file} can be used")]
    if config.peer_listen is not None:
        findings.append(_door(config.peer_listen, key, running))
    return [*findings, *(finding for place in config.peers or () for finding in _peers_at(place, config, key))]


def _door(listen: str, key: "FleetKey", running: Running) -> DoctorFinding:
    """Whether the door of a server that runs answers, or else whether one could listen."""
    host, port = parse_address(listen)
    if running.is_owned:
        place = EVERYWHERE.get(host, host)
        cause = _ask(f"https://[{place}]:{port}" if ":" in place else f"https://{place}:{port}", key)
        if cause is None:
            return ok("door", f"the server that runs gives blobs at {listen}")
        hint = "its first engine named no peer_listen, or another one: end that server"
        return warning("door", f"the server that runs gives nothing at {listen}: {cause}", hint)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_both = address[0] == "::" and socket.has_dualstack_ipv6()  # as the door takes it
        socket.create_server(address[:2], family=family, dualstack_ipv6=is_both).close()
    except OSError as exc:
        return error("door", f"the door cannot listen at {listen}: {exc.strerror or exc}", "name another port or host")
    return ok("door", f"it can listen at {listen}")


def _peers_at(place: str, config: Config, key: "FleetKey") -> list[DoctorFinding]:
    """A question to everybody who is found there, as far as a server would ask them."""
    from tiered_kv.tiers.peers.found import PeerFinder, own_urls  # noqa: PLC0415 - its packages are an extra

    store = None
    try:
        if place == BUCKETS_PEERS:
            store = ObjectStore(config.location(), timeout_s=config.storage_timeout_s)
        urls = PeerFinder([place], store, partial(own_urls, config.peer_listen, config.peer_url)).look(place)
    except (OSError, UnicodeError, TierUnavailable) as exc:
        return [warning("peers", f"{place}: nobody can be looked for: {exc}", "they are looked for again every minute")]
    finally:
        if store is not None:
            store.close()
    if not urls:
        hint = "they are found once their servers run with peer_listen"
        return [warning("peers", f"{place}: no other machine is there now", hint)]
    return [_peer(url, key) for url in urls[:PEERS_MAX]]


def _peer(url: str, key: "FleetKey") -> DoctorFinding:
    started_s = time.monotonic()
    cause = _ask(url, key)
    if cause is None:
        return ok("peers", f"{url} answers after {(time.monotonic() - started_s) * 1e3:.1f} ms, and takes our token")
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        text = f"{url} has another certificate than the fleet's: another key, or something else listens there"
        return error("peers", text, "copy one peer_key_file to every machine, and end their servers after that")
    if "status=401" in cause:
        text = f"{url} takes our token for old: the clocks of both machines are hours apart"
        return error("peers", text, "set both clocks (NTP)")
    return warning("peers", f"{url}: {cause}", "start its server with peer_listen, and let the port through")


def _ask(url: str, key: "FleetKey") -> str | None:
    """Ask a door a question; the reason if there is no answer."""
    from tiered_kv.tiers.peers.peer import Peer  # noqa: PLC0415 - its packages are an extra

    peer = Peer(url, key, key.client_context(), time.monotonic)
    try:
        peer.count_held([NOBODYS], Deadline(ASK_S))
    except TierUnavailable as exc:
        return str(exc).partition(" cause=")[2] or str(exc)
    finally:
        peer.close()
    return None
