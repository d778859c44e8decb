"""Parameters of one request for the cache, in vLLM's ``kv_transfer_params``, and its hints.

::

    {"kv_transfer_params": {"tiered_kv.skip_save": true, "tiered_kv.skip_load": true, "tiered_kv.save_decode": false,
                            "tiered_kv.pin_ttl_s": 3600, "tiered_kv.tag": "tenant-a",
                            "tiered_kv.session_id": "run-17", "tiered_kv.release": true, "tiered_kv.demote": true,
                            "tiered_kv.prefetch": "run-16", "tiered_kv.peer": "https://node-b:7460"}}

Owns their names and kinds, and those of the actions in vLLM's ``kv_hints``, which say the same where a parameter says
nothing. A parameter that is unknown or has a bad value is left out, counted and logged; the request goes on without it.
But a request whose tag cannot be read, or that brings parameters by the hundred, is not stored: nobody could erase it
later. No text of a tag or a session goes further than this module and a producer's answer (``disaggregated.py``), nor
into a warning. Names that do not begin with ``tiered_kv.`` are other connectors', and so are actions that are unknown
here: these are only counted. Called by the scheduler side, once per request.
"""

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiered_kv.config import parse_time_s, peer_url
from tiered_kv.keys.tags import NO_TAG, session_name, tag_digest
from tiered_kv.server.pins import PIN_TTL_MAX_S
from tiered_kv.vllm.compat import kv_hints_of, session_id_of
from tiered_kv.vllm.logs import RareWarnings

logger = logging.getLogger(__name__)

PREFIX: Final = "tiered_kv."
SKIP_SAVE: Final = f"{PREFIX}skip_save"
SKIP_LOAD: Final = f"{PREFIX}skip_load"
SAVE_DECODE: Final = f"{PREFIX}save_decode"
PIN_TTL_S: Final = f"{PREFIX}pin_ttl_s"
TAG: Final = f"{PREFIX}tag"
SESSION_ID: Final = f"{PREFIX}session_id"
RELEASE: Final = f"{PREFIX}release"
DEMOTE: Final = f"{PREFIX}demote"
PREFETCH: Final = f"{PREFIX}prefetch"
PEER: Final = f"{PREFIX}peer"
STORED_TOKENS: Final = f"{PREFIX}stored_tokens"
"""Not a user's: a producer's answer carries it, and a router passes it on to the consumer (``disaggregated.py``)."""

NAMES: Final = frozenset({TAG, SESSION_ID, PREFETCH})
"""Parameters whose values are names of users, which no warning shows."""

TTL_DEFAULT: Final = {"retain": "5m", "pin": "1h"}
"""How long a hint keeps a prompt that does not say it: the times of providers' prompt caching."""

SHOWN_CHARS: Final = 80

PARAMS_MAX: Final = 64
"""More in one request are not looked at one by one: a hundred thousand would take vLLM's scheduler ten seconds."""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """The parameters of one request.

    Attributes:
        skips_save: Nothing of it is stored.
        skips_load: Nothing is loaded for it.
        saves_decode: Whether its generated tokens are stored; None: as the engine's setting says.
        pin_ttl_s: Its prompt's chunks are kept from eviction for so long.
        stored_tokens: Another engine has stored so many tokens of its prompt, or is about to.
        tag: Digest of its owner (``keys/tags.py``).
        session: Name of the user's session that it belongs to, one of its tag and salt (``keys/tags.py``); empty: none.
        releases: The session ends with it.
        demotes: The session's own chunks leave host memory after it.
        prefetches: Name of a session that will go on soon; empty: none.
        peer: The peer that is asked first, one of the setting ``peers``; empty: whichever.
    """

    skips_save: bool = False
    skips_load: bool = False
    saves_decode: bool | None = None
    pin_ttl_s: float | None = None
    stored_tokens: int = 0
    tag: bytes = NO_TAG
    session: bytes = b""
    releases: bool = False
    demotes: bool = False
    prefetches: bytes = b""
    peer: str = ""

    @property
    def session_hints(self) -> tuple[str, ...]:
        """Hints of the session that follow the request (``protocol.Hint``)."""
        return ("demote",) * self.demotes + ("release",) * self.releases

    def saves_generated(self, setting: bool) -> bool:
        """Whether generated tokens of the request are stored, where the engine's setting is ``setting``."""
        return setting if self.saves_decode is None else self.saves_decode


NO_PARAMS: Final = RequestParams()


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _ttl(value: object) -> float:
    try:
        seconds = parse_time_s(value)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= PIN_TTL_MAX_S:
        raise ValueError(f'a number of seconds from 1 to {PIN_TTL_MAX_S}, or a time such as "5m" or "1h"')
    return seconds


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a number of tokens")
    return value


def _tag(value: object) -> bytes:
    return tag_digest(value if isinstance(value, str) else "")


def _name(value: object) -> str:
    _tag(value)  # what a session may be called is what a tag may be
    return str(value)


def _known(peers: Collection[str]) -> dict[str, tuple[str, Callable[[object], Any]]]:
    """The field of each parameter, and what reads its value."""

    def peer(value: object) -> str:
        if all(place.startswith("https://") for place in peers) and value not in peers:
            raise ValueError("one of the setting peers")
        return peer_url(value)  # of those that are found later the server knows which are peers

    return {
        SKIP_SAVE: ("skips_save", _boolean),
        SKIP_LOAD: ("skips_load", _boolean),
        SAVE_DECODE: ("saves_decode", _boolean),
        PIN_TTL_S: ("pin_ttl_s", _ttl),
        TAG: ("tag", _tag),
        SESSION_ID: ("session", _name),
        RELEASE: ("releases", _boolean),
        DEMOTE: ("demotes", _boolean),
        PREFETCH: ("prefetches", _name),
        PEER: ("peer", peer),
        STORED_TOKENS: ("stored_tokens", _count),
    }


class RequestParamsReader:
    """Reads the parameters of requests and warns of those it cannot read.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        counters: Counter[str],
        monotonic: Callable[[], float],
        peers: Collection[str] = (),
        *,
        without: Collection[str] = (),
        sessions_need_owner: bool = False,
    ) -> None:
        """Begin.

        Args:
            counters: Gets ``control_refused``, once per parameter that was left out, and ``hints_unknown``.
            peers: Those of the settings. A request chooses among them and what they find: it never has us connect to
                what it names.
            without: Parameters that mean nothing here: unknown ones.
            sessions_need_owner: Sessions of requests with neither tag nor ``cache_salt`` are left out.
        """
        self._counters = counters
        self._known = {name: one for name, one in _known(peers).items() if name not in without}
        self._sessions_need_owner = sessions_need_owner
        self._warnings = RareWarnings(logger, monotonic)

    def read(self, request: Any, request_id: str | None = None) -> RequestParams:
        """The parameters of a request of vLLM; never raises.

        Args:
            request: Or what vLLM tells its tiers of one, which has its id under another name, and no ``cache_salt``.
        """
        given = request.kv_transfer_params
        params = dict(given) if isinstance(given, Mapping) else {}  # what is no mapping vLLM itself stumbles over
        if session_id := session_id_of(request):
            params.setdefault(SESSION_ID, session_id)
        for name, value in self._of_hints(request, params.get(SESSION_ID)):
            params.setdefault(name, value)
        ours = {name: params[name] for name in params if isinstance(name, str) and name.startswith(PREFIX)}
        if not ours:
            return NO_PARAMS
        request_id = request_id or request.request_id
        if len(ours) > PARAMS_MAX:
            hint = f"at most {PARAMS_MAX} names that begin with {PREFIX}"
            self._refuse(request_id, "too many parameters", next(iter(ours)), hint, is_tag=True)
            return RequestParams(skips_save=True)
        return self._read(request_id, getattr(request, "cache_salt", None), ours)

    def _of_hints(self, request: Any, session_id: object) -> list[tuple[str, object]]:
        """The parameters that the hints of a request of this session stand for."""
        found: list[tuple[str, object]] = []
        for kind, payload in kv_hints_of(request):
            action = kind.removeprefix("kv.")
            if action in TTL_DEFAULT:
                found.append((PIN_TTL_S, payload.get("ttl", TTL_DEFAULT[action])))
            elif action in ("release", "deref"):
                found.append((RELEASE, True))
            elif action == "demote":
                found.append((DEMOTE, True))
            elif action == "prefetch":
                found.append((PREFETCH, payload.get("session_id", session_id)))
            else:
                self._counters["hints_unknown"] += 1
        return found

    def _read(self, request: str, cache_salt: str | None, params: Mapping[str, object]) -> RequestParams:
        found: dict[str, Any] = {}
        is_tag_lost = False
        for name, value in params.items():
            if value is None:
                continue
            if name not in self._known:
                known = [one.removeprefix(PREFIX) for one in self._known]
                near = difflib.get_close_matches(name[len(PREFIX) :][:SHOWN_CHARS], known, n=1)
                hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known: {', '.join(self._known)}"
                is_tag_lost |= near == ["tag"]
                self._refuse(request, "unknown parameter", name, hint, is_tag=near == ["tag"])
                continue
            field, parse = self._known[name]
            try:
                found[field] = parse(value)
            except ValueError as exc:
                is_tag_lost |= name == TAG
                shown = "" if name in NAMES else f"{_shown(value)} "
                self._refuse(request, f"bad value {shown}of parameter", name, f"expected {exc}", is_tag=name == TAG)
        if is_tag_lost:
            found["skips_save"] = True
            for field in ("session", "prefetches"):
                found.pop(field, None)  # of whom is not known
        if self._sessions_need_owner and "tag" not in found and not cache_salt:
            for name, field in ((SESSION_ID, "session"), (PREFETCH, "prefetches")):
                if found.pop(field, None) is not None:
                    expected = f"expected {TAG} or cache_salt beside it"
                    self._refuse(request, "no owner for parameter", name, expected, is_tag=False)
        for name, field in ((RELEASE, "releases"), (DEMOTE, "demotes")):
            if found.get(field) and "session" not in found:
                del found[field]
                self._refuse(
                    request, "no session for parameter", name, f"expected {SESSION_ID} beside it", is_tag=False
                )
        tag = found.get("tag", NO_TAG)
        for field in ("session", "prefetches"):
            if field in found:
                found[field] = session_name(found[field], tag, cache_salt)
        return RequestParams(**found) if found else NO_PARAMS

    def _refuse(self, request: str, what: str, name: str, hint: str, *, is_tag: bool) -> None:
        self._counters["control_refused"] += 1
        self._warnings.warn(
            "%s %s, %s (%s). request=%s",
            what,
            _shown(name),
            "nothing of the request is stored, because nobody could erase it"
            if is_tag
            else "the request goes on without it",
            hint,
            _shown(request),
        )


def _shown(value: object) -> str:
    """A client's value for a log line: short and on one line."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
