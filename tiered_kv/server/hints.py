"""Hints: what a gateway, or a request, says of what will be asked for and what will not any more.

Decides nothing but what is meant; what is done is ``prefetching.py``, ``pins.py`` and ``user_sessions.py``. Hints
change when bytes move and what goes first, never what a request gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ProtocolError
from tiered_kv.keys.chunk_record import KEY_BYTES, PREFIX_DIGEST_BYTES
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.tags import SESSION_BYTES, TAG_BYTES
from tiered_kv.server import protocol as m
from tiered_kv.server.connection import Connection
from tiered_kv.server.prefetching import WantedPrefix
from tiered_kv.server.sessions import Sessions

DONE: Final = "done"
UNKNOWN: Final = "unknown"
NO_ENGINE: Final = "no_engine"
REFUSED: Final = "refused"
NOWHERE: Final = "nowhere"

_COUNTED: Final = {
    UNKNOWN: "hints_of_nothing",
    NO_ENGINE: "hints_without_engine",
    REFUSED: "hints_refused",
    NOWHERE: "hints_refused",
}
SPACES_NAMED: Final = 20
"""Namespaces that an answer lists."""


class Hints:
    """What comes of hints.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine, sessions: Sessions) -> None:
        self._engine = engine
        self._sessions = sessions
        self._actions: dict[str, Callable[[m.Hint], m.Hinted]] = {
            "prefetch": self._prefetch,
            "pin": self._pin,
            "demote": self._demote,
            "release": self._release,
        }

    def take(self, connection: Connection, hint: m.Hint) -> None:
        """Do what a hint says; an admin is told what came of it.

        Raises:
            ProtocolError: It means nothing, or a scheduler's has no session of a user.
        """
        is_session = len(hint.session) == SESSION_BYTES
        if hint.action not in self._actions or len(hint.tag) != TAG_BYTES or (hint.session and not is_session):
            raise ProtocolError(f"bad hint. action={hint.action[:40]!a} session_bytes={len(hint.session)}")
        if not is_session and (connection.role != "admin" or hint.action in ("demote", "release")):
            raise ProtocolError(f"a hint of no user's session. action={hint.action} role={connection.role}")
        hinted = self._actions[hint.action](hint)
        self._engine.count(_COUNTED.get(hinted.outcome) or f"hints_{hint.action}")
        if connection.role == "admin":
            connection.send(hinted)

    def describe(self, connection: Connection, request: m.NamespaceRequest) -> None:
        """Tell an admin the record of a namespace that engines serve now."""
        spaces = {digest.hex(): space for digest, (space, _) in self._sessions.open_spaces().items()}
        meant = [space for digits, space in spaces.items() if digits.startswith(request.digits)]
        record = meant[0].record if len(meant) == 1 else b""
        connection.send(m.NamespaceRecord(record, sorted(spaces)[:SPACES_NAMED]))

    def _prefetch(self, hint: m.Hint) -> m.Hinted:
        prefix = self._prefix(hint)
        if isinstance(prefix, m.Hinted):
            return prefix
        space, session = self._sessions.open_spaces()[prefix.namespace]
        if not self._sessions.prefetching.begin(session, _with_state(prefix, space), hint.tag):
            return m.Hinted(REFUSED)
        return m.Hinted(DONE, len(prefix.keys))

    def _pin(self, hint: m.Hint) -> m.Hinted:
        prefix = self._prefix(hint)
        if isinstance(prefix, m.Hinted):
            return prefix
        known = self._engine.held_chunks(prefix.namespace, prefix.keys, prefix.digests)
        if not known:
            return m.Hinted(UNKNOWN)
        outcome = self._sessions.pinning.pin(prefix.namespace, m.Pin(prefix.keys[known - 1], hint.ttl_s, hint.tag))
        return m.Hinted(outcome, known if outcome == DONE else 0)

    def _demote(self, hint: m.Hint) -> m.Hinted:
        return m.Hinted(DONE if self._sessions.users.demote(hint.session) else UNKNOWN)

    def _release(self, hint: m.Hint) -> m.Hinted:
        return m.Hinted(DONE if self._sessions.users.end(hint.session) else UNKNOWN)

    def _prefix(self, hint: m.Hint) -> WantedPrefix | m.Hinted:
        """What a hint means, in a namespace that an engine serves now; or why there is nothing.

        Raises:
            ProtocolError: The keys and digests of a prefix do not match.
        """
        spaces = self._sessions.open_spaces()
        if hint.session:
            found = self._sessions.users.state_of(hint.session, spaces.__contains__)
            if found is None:
                return m.Hinted(UNKNOWN if spaces else NO_ENGINE)
            namespace, records = found
            if records[0].chunk_index:
                return m.Hinted(UNKNOWN)  # its beginning was lost, and nothing behind that can be used
            keys, digests = [one.key for one in records], [one.prefix_sha256 for one in records]
            return WantedPrefix(namespace, keys, digests, owner=hint.session)
        count, rest = divmod(len(hint.keys), KEY_BYTES)
        if rest or not count or len(hint.digests) != count * PREFIX_DIGEST_BYTES:
            raise ProtocolError(f"bad hint. keys={len(hint.keys)} digests={len(hint.digests)}")
        if hint.namespace not in spaces:
            return m.Hinted(NO_ENGINE)
        return WantedPrefix(hint.namespace, _parts(hint.keys, KEY_BYTES), _parts(hint.digests, PREFIX_DIGEST_BYTES))


def _parts(joined: bytes, size: int) -> list[bytes]:
    return [joined[start : start + size] for start in range(0, len(joined), size)]


def _with_state(prefix: WantedPrefix, space: Namespace) -> WantedPrefix:
    """The same, with the state behind it where the model has recurrent layers."""
    return dataclasses.replace(prefix, state_parts=len(space.fields.get("recurrent_state") or ()))
