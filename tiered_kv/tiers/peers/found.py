"""Where peers are: named in the settings, every address of a DNS name, or whoever of a bucket's machines listens.

::

    _tiered_kv/peers/HOST:PORT     an empty object: a door listens there, or did two hours ago

One LIST tells every door of a bucket, and by the store's clock how long ago it was said to be there. Trusts nobody:
what stands there is an address at most, and only who has the fleet's key is ever told a token. Owns the records and how
addresses are found; must not connect to a peer. Called by ``tier.py``, stacked by ``tiers/open.py``.
"""

import contextlib
import logging
import random
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Final

from tiered_kv.config import BUCKETS_PEERS, parse_address
from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet.layout import PEERS, Objects, parse_peer_path
from tiered_kv.tiers.base import Tier, TierWrapper

logger = logging.getLogger(__name__)

FIND_S: Final = 60.0
"""Between two looks for peers. One that is new is found that late."""

RECORD_S: Final = 600.0
"""How often a door's record is written: 4,400 requests a month."""

OLD_S: Final = 2 * 3600.0
"""A record that is older than the newest one by this is of a machine that is gone."""

GONE_S: Final = 24 * 3600.0
"""One that is older by this is removed, by who writes records."""

FOUND_MAX: Final = 1024


class PeerFinder:
    """Finds the addresses of peers.

    Threads: one at a time.
    """

    def __init__(
        self, places: Sequence[str], store: Objects | None, own: Callable[[], Collection[str]] = tuple
    ) -> None:
        """Find what the setting ``peers`` says.

        Args:
            places: ``https://HOST:PORT``, ``dns://NAME:PORT``, or the bucket.
            store: The bucket's, where they name it.
            own: Says the URLs of this machine's own door, which is no peer; they may change. May block.
        """
        self._places = tuple(places)
        self._store = store
        self._own = own

    @property
    def is_fixed(self) -> bool:
        """Whether the settings name every peer."""
        return not any(place.startswith("dns://") or place == BUCKETS_PEERS for place in self._places)

    def find(self, known: Sequence[str]) -> list[str]:
        """URLs of all peers, in the order in which they are asked: those that are known already as they are.

        Those that are new come in a random order, so that not every machine asks the same ones. Blocks on the resolver
        and the store; of a place that does not answer what was known before stays.
        """
        found: dict[str, None] = {}
        for place in self._places:
            try:
                found |= dict.fromkeys(self.look(place))
            except (OSError, UnicodeError, TierUnavailable) as exc:
                logger.warning("peers are not looked for now; those that were found before stay. %s: %s", place, exc)
                found |= dict.fromkeys(known)
        new = [url for url in found if url not in known]
        if not self.is_fixed:
            random.shuffle(new)
        return [*(url for url in known if url in found), *new][:FOUND_MAX]

    def look(self, place: str) -> list[str]:
        """URLs of all peers of one place, as it says now.

        Raises:
            OSError, TierUnavailable: The resolver or the store failed.
        """
        scheme, _, address = place.partition("://")
        if place == BUCKETS_PEERS:
            assert self._store is not None, "settings were checked"
            urls = recorded(self._store)
        elif scheme == "dns":
            host, port = parse_address(address)
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = sorted({str(entry[4][0]) for entry in entries if "%" not in str(entry[4][0])})  # of a link
            urls = [url_of(one, port) for one in addresses]
        else:
            return [place]  # whoever names it means it
        own = self._own()
        return [url for url in urls if url not in own]


class DoorRecord(TierWrapper):
    """A bucket in which it stands that this machine's door listens, for as long as its server runs.

    Threads: any; ``flush`` is called by one at a time.
    """

    def __init__(self, bucket: Tier, store: Objects, url: Callable[[], str], monotonic: Callable[[], float]) -> None:
        """Record a URL at the first flush of ``bucket``, every ``RECORD_S``, and when it is another one.

        Args:
            url: Where the door is reached now; must not block.
        """
        super().__init__(bucket)
        self._store = store
        self._url = url
        self._path = ""
        self._monotonic = monotonic
        self._look_due_s = self._due_s = monotonic()

    def flush(self) -> None:
        self.inner.flush()
        now_s = self._monotonic()
        if now_s < self._look_due_s:
            return
        self._look_due_s = now_s + FIND_S
        before, path = self._path, PEERS + self._url().removeprefix("https://")
        if path == before and now_s < self._due_s:
            return
        self._store.put(path, b"")
        self._path = path
        gone = [old for old, age_s in _records(self._store) if age_s > GONE_S or old == before != path]
        if gone:
            self._store.delete(gone[:FOUND_MAX])
        self._due_s = self._monotonic() + RECORD_S

    def close(self) -> None:
        """Take the record away and close the bucket; one that stays is not believed after two hours."""
        try:
            self._store.delete([self._path] if self._path else [])
        except TierUnavailable as exc:
            logger.info("the record of this door stays in the bucket for a while. %s", exc)
        finally:
            self.inner.close()


def recorded(store: Objects) -> list[str]:
    """URLs of the doors that a bucket names.

    Raises:
        TierUnavailable: The store failed.
    """
    return ["https://" + path.removeprefix(PEERS) for path, age_s in _records(store) if age_s <= OLD_S]


def _records(store: Objects) -> list[tuple[str, float]]:
    """Paths of the records, each with how much older it is than the newest: by the store's clock, no machine's."""
    found = [info for info in store.list(PEERS) if parse_peer_path(info.path) is not None]
    newest_s = max((info.modified_s for info in found), default=0.0)
    return [(info.path, newest_s - info.modified_s) for info in found]


def own_urls(listen: str | None, peer_url: str | None = None) -> list[str]:
    """URLs of this machine's door, if it has one; the first is the one that other machines reach it by.

    Of a door that listens at every address that is the address of this machine's way out.

    Args:
        listen: ``HOST:PORT`` where it listens.
        peer_url: What the settings say that it is reached by.
    """
    if listen is None:
        return []
    host, port = parse_address(listen)
    addresses = [host, *_addresses(host)]
    if _are_all(addresses):
        addresses = [_way_out(), *_addresses(socket.gethostname())]
    said = [peer_url] if peer_url is not None else []
    return list(dict.fromkeys([*said, *(url_of(address, port) for address in addresses)]))


def door_url(listen: str, peer_url: str | None = None) -> Callable[[], str]:
    """What says where other machines reach this one's door, as the first of :meth:`own_urls`, and does not block.

    A machine may get its way out, or another address, long after its server began.
    """
    host, port = parse_address(listen)
    if peer_url is None and _are_all([host, *_addresses(host)]):
        return lambda: url_of(_way_out(), port)
    url = own_urls(listen, peer_url)[0]
    return lambda: url


def _are_all(addresses: Sequence[str]) -> bool:
    return not {"0.0.0.0", "::"}.isdisjoint(addresses)


def _addresses(host: str) -> list[str]:
    """What a name is found under, as :meth:`PeerFinder.look` finds it; nothing where no resolver knows it."""
    with contextlib.suppress(OSError, UnicodeError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return []


def url_of(host: str, port: int) -> str:
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _way_out() -> str:
    """The address that this machine has where it talks to others; sends nothing."""
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((anywhere, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue  # no such way
    return "127.0.0.1"
