"""What the scheduler side remembers of one request: its keys, its lookup, its load and how far it was stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.rolling import PrefixKeys
from tiered_kv.vllm.extras import RequestExtras


@dataclass(slots=True)
class Lookup:
    """A lookup that was sent.

    Attributes:
        start: First chunk that is leased; those before it were in the GPU's prefix cache when it was sent.
        given_up: The request was answered without it; it only tells what need not be stored.
    """

    id: int
    generation: int
    start: int
    sent_s: float
    answered_s: float | None = None
    given_up: bool = False


@dataclass(slots=True)
class RequestState:
    """One request of vLLM.

    Attributes:
        resets: How many cache resets had happened when the request was first seen; an older request is never stored.
        held: Leading chunks the hierarchy holds, as last told.
        offer: Tokens computed on the GPU and tokens offered beyond them, as last answered.
        loading_keys: Keys whose chunks are being copied for this request now.
        stored: Chunks that were dealt with by the store path.
    """

    request: Any
    extras: RequestExtras
    resets: int
    keys: PrefixKeys | None = None
    namespace: bytes = b""
    lookup: Lookup | None = None
    held: int = 0
    offer: tuple[int, int] = (0, 0)
    loading_keys: Sequence[bytes] = ()
    loading_lookup: Lookup | None = None
    stored: int = 0
    is_load_failed: bool = False
    is_finished: bool = False

    @property
    def is_loading(self) -> bool:
        """Whether workers may be copying into this request's blocks."""
        return self.loading_lookup is not None

    def update_keys(self, namespace: Namespace, chunk_tokens: int) -> PrefixKeys:
        """The request's keys, computed once and extended as it grows.

        Raises:
            Unaccountable: The request's extras cannot be accounted for; it must be left alone.
        """
        if self.keys is None or self.namespace != namespace.digest:
            self.keys, self.namespace = PrefixKeys(namespace, chunk_tokens), namespace.digest
        tokens = self.request._all_token_ids
        if len(tokens) // chunk_tokens > len(self.keys.keys):
            self.keys.extend(tokens, self.extras.extras_for)
        return self.keys
