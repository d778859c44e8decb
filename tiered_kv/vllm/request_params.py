"""Parameters of one request for the cache, in vLLM's ``kv_transfer_params``.

::

    {"kv_transfer_params": {"tiered_kv.skip_save": true, "tiered_kv.skip_load": true, "tiered_kv.save_decode": false,
                            "tiered_kv.pin_ttl_s": 3600, "tiered_kv.tag": "tenant-a"}}

Owns their names and kinds. A parameter that is unknown or has a bad value is left out, counted and logged;
the request goes on without it. But a request whose tag cannot be read is not stored: nobody could erase it later. No
tag's text goes further than this module and a producer's answer (``disaggregated.py``), nor into a warning. Names that
do not begin with ``tiered_kv.`` are other connectors'. Called by the scheduler side, once per request.
"""

import difflib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiered_kv.keys.tags import NO_TAG, tag_digest

logger = logging.getLogger(__name__)

PREFIX: Final = "tiered_kv."
SKIP_SAVE: Final = f"{PREFIX}skip_save"
SKIP_LOAD: Final = f"{PREFIX}skip_load"
SAVE_DECODE: Final = f"{PREFIX}save_decode"
PIN_TTL_S: Final = f"{PREFIX}pin_ttl_s"
TAG: Final = f"{PREFIX}tag"
STORED_TOKENS: Final = f"{PREFIX}stored_tokens"
"""Not a user's: a producer's answer carries it, and a router passes it on to the consumer (``disaggregated.py``)."""

PIN_TTL_MAX_S: Final = 7 * 86400
"""Longest pin of a request. A longer one is renewed, or an operator's: ``tiered-kv pin`` has no limit."""

WARNINGS_MAX: Final = 20
WARNINGS_EVERY_S: Final = 60.0
"""So many warnings in so much time: requests come from clients, and one that errs must not fill the log."""

SHOWN_CHARS: Final = 80


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
    """

    skips_save: bool = False
    skips_load: bool = False
    saves_decode: bool | None = None
    pin_ttl_s: float | None = None
    stored_tokens: int = 0
    tag: bytes = NO_TAG

    def saves_generated(self, setting: bool) -> bool:
        """Whether generated tokens of the request are stored, where the engine's setting is ``setting``."""
        return setting if self.saves_decode is None else self.saves_decode


NO_PARAMS: Final = RequestParams()


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _ttl(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 1 <= value <= PIN_TTL_MAX_S:  # type: ignore[arg-type, operator]
        raise ValueError(f"a number of seconds from 1 to {PIN_TTL_MAX_S}")
    return float(value)  # type: ignore[arg-type]


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a number of tokens")
    return value


def _tag(value: object) -> bytes:
    return tag_digest(value if isinstance(value, str) else "")


_KNOWN: Final[Mapping[str, tuple[str, Callable[[object], Any]]]] = {
    SKIP_SAVE: ("skips_save", _boolean),
    SKIP_LOAD: ("skips_load", _boolean),
    SAVE_DECODE: ("saves_decode", _boolean),
    PIN_TTL_S: ("pin_ttl_s", _ttl),
    TAG: ("tag", _tag),
    STORED_TOKENS: ("stored_tokens", _count),
}


class RequestParamsReader:
    """Reads the parameters of requests and warns of those it cannot read.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(self, counters: Counter[str], monotonic: Callable[[], float]) -> None:
        """``counters`` gets ``control_refused``, once per parameter that was left out."""
        self._counters = counters
        self._monotonic = monotonic
        self._warnings = 0
        self._since_s = -WARNINGS_EVERY_S

    def read(self, request: Any) -> RequestParams:
        """The parameters of a request of vLLM; never raises."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping):
            return NO_PARAMS  # none; what is not a mapping vLLM itself stumbles over
        found: dict[str, Any] = {}
        is_tag_lost = False
        for name, value in params.items():
            if not isinstance(name, str) or not name.startswith(PREFIX) or value is None:
                continue
            if name not in _KNOWN:
                known = [one.removeprefix(PREFIX) for one in _KNOWN]
                near = difflib.get_close_matches(name[len(PREFIX) :][:SHOWN_CHARS], known, n=1)
                hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known: {', '.join(_KNOWN)}"
                is_tag_lost |= near == ["tag"]
                self._refuse(request, "unknown parameter", name, hint, is_tag=near == ["tag"])
                continue
            field, parse = _KNOWN[name]
            try:
                found[field] = parse(value)
            except ValueError as exc:
                is_tag_lost |= name == TAG
                shown = "" if name == TAG else f"{_shown(value)} "  # a tag is a tenant's name
                self._refuse(request, f"bad value {shown}of parameter", name, f"expected {exc}", is_tag=name == TAG)
        if is_tag_lost:
            found["skips_save"] = True
        return RequestParams(**found) if found else NO_PARAMS

    def _refuse(self, request: Any, what: str, name: str, hint: str, *, is_tag: bool) -> None:
        self._counters["control_refused"] += 1
        now_s = self._monotonic()
        if now_s - self._since_s >= WARNINGS_EVERY_S:
            self._since_s, self._warnings = now_s, 0
        self._warnings += 1
        if self._warnings > WARNINGS_MAX:
            return
        more = "; more of these are only counted for a while" if self._warnings == WARNINGS_MAX else ""
        logger.warning(
            "%s %s, %s (%s). request=%s%s",
            what,
            _shown(name),
            "nothing of the request is stored, because nobody could erase it"
            if is_tag
            else "the request goes on without it",
            hint,
            _shown(request.request_id),
            more,
        )


def _shown(value: object) -> str:
    """A client's value for a log line: short and on one line."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
