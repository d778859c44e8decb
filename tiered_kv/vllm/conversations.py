"""Which requests go on from an earlier one: of these a next turn is likely, of others nobody knows.

A prompt's end is told by so many whole chunks, and by so many tokens behind them, whole blocks. A prompt that has an
earlier one's end inside it goes on from there::

    earlier    |--- chunk ---|--- chunk ---|-- 5 blocks --|
    goes on    |--- chunk ---|--- chunk ---|-- 5 blocks --|- answer, new question ...
    does not   |--- chunk ---|--- chunk ---|-- other tokens ...      a common beginning is no conversation

The first request of a conversation goes on from nothing. A session's name says that there will be a next one, and is
believed until too few have come: an application may give all its requests one name.

Owns the ends of this engine's last conversations, in names of tokens and never in tokens, and which names of sessions
were believed in vain. Must not know what is stored of them. Called by ``request_saves.py`` when a request is over, in
vLLM's scheduler thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

ENDS_MAX: Final = 1 << 14
"""Ends that are remembered; those behind the chunk that was met longest ago go. A few MiB."""

ENDS_BEHIND_MAX: Final = 64
"""Ends behind one chunk, as where many short questions follow one long beginning."""

NO_TOKENS: Final = b""
"""Names an end that is a chunk's."""

SESSIONS_MAX: Final = 1 << 14
"""Names of sessions that are remembered; those heard longest ago go, and are believed anew."""

IN_VAIN_MAX: Final = 4
"""Requests of a session that it may begin and not go on with: as many as it may have lines (0037)."""


class Conversations:
    """Where conversations ended, the last ones that this engine saw.

    Only its own methods write its fields. Threads: one owner.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()  # tokens by name, by the chunk before
        self._count = 0
        self._in_vain: OrderedDict[bytes, int] = OrderedDict()  # by the session's name

    def __len__(self) -> int:
        """Ends that are remembered."""
        return self._count

    def goes_on(self, keys: Sequence[bytes], tokens: int, name: Callable[[int, int], bytes | None]) -> bool:
        """Whether a prompt goes on from an earlier one; from now on the conversation ends where this one does.

        So what was said once, such as a document that many ask about, makes one of them a conversation, not all.

        Args:
            keys: Of the prompt's whole chunks.
            tokens: Behind them, in whole blocks.
            name: Names the prompt's first tokens behind so many of its chunks, so many of them; None: it has no name.
        """
        # One look at many chunks, of which few are ends.
        ends = [keys.index(key) + 1 for key in self._ends.keys() & keys]
        found = any(self._takes(keys, chunks, tokens, name) for chunks in sorted(ends, reverse=True))
        own = name(len(keys), tokens) if keys and tokens else NO_TOKENS
        if keys and own is not None:
            self._remember(keys[-1], own, tokens)
        return found

    def believes(self, session: bytes, *, goes_on: bool) -> bool:
        """Whether a session's name says that a request of it is gone on from; true of one that goes on itself.

        Of those that do not, as many are believed as others of the session have gone on, and ``IN_VAIN_MAX`` before.
        """
        in_vain = self._in_vain.pop(session, 0)
        is_believed = goes_on or in_vain < IN_VAIN_MAX
        if goes_on:
            in_vain -= 1
        elif is_believed:
            in_vain += 1
        if in_vain > 0:
            self._in_vain[session] = in_vain
            if len(self._in_vain) > SESSIONS_MAX:
                self._in_vain.popitem(last=False)
        return is_believed

    def _takes(self, keys: Sequence[bytes], chunks: int, tokens: int, name: Callable[[int, int], bytes | None]) -> bool:
        """Forget an end behind so many chunks of a prompt, if the prompt has it and goes on."""
        ends = self._ends.get(keys[chunks - 1])
        if ends is None:
            return False
        for length in set(ends.values()):
            if chunks == len(keys) and length >= tokens:
                continue
            own = name(chunks, length) if length else NO_TOKENS
            if own in ends:
                del ends[own]
                self._count -= 1
                if not ends:
                    del self._ends[keys[chunks - 1]]
                return True
        return False

    def _remember(self, chunk: bytes, name: bytes, tokens: int) -> None:
        ends = self._ends.setdefault(chunk, {})
        self._count -= ends.pop(name, None) is not None
        ends[name] = tokens
        self._count += 1
        if len(ends) > ENDS_BEHIND_MAX:
            del ends[next(iter(ends))]
            self._count -= 1
        self._ends.move_to_end(chunk)
        while self._count > ENDS_MAX:
            _, oldest = self._ends.popitem(last=False)
            self._count -= len(oldest)
