"""Extras of a request: everything besides its tokens that changes its KV.

Owns which extras apply to a chunk. Must not trust that list to be complete: vLLM's own function for its block hashes
serves as the alarm. If it yields a kind or a count that our extras do not account for, the request is neither looked up
nor stored. Called by the scheduler side, once per request and again when chunks grow out of its answer.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

import torch
import vllm

from tiered_kv.keys.extras import Embeds, Extra, Lora, Multimodal, Salt, encode
from tiered_kv.vllm.compat import OLDEST, generate_block_hash_extra_keys, release
from tiered_kv.vllm.identity.adapters import Adapter, Adapters, Unaccountable

SESSIONS_FROM: Final = (0, 31)
"""First vLLM whose streaming sessions are looked up and stored."""

_COUNTED: Final = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")
"""What vLLM calls a multimodal item that it does not hash: by a counter that starts again with every engine."""

_TAGGED: Final = {Lora: "lora/3", Multimodal: "mm/3", Salt: "cache_salt/2", Embeds: "prompt_embeds/2"}
"""What vLLM's function gives for each of our kinds since 0.31: tag and length of the tuple."""

_UNTAGGED: Final = {Lora: "str", Multimodal: "identifier,offset", Salt: "str", Embeds: "bytes"}
"""The same up to 0.30."""


def hashes_media(vllm_config: Any) -> bool:
    """Whether vLLM names multimodal items by their content. With both of its caches off it counts them instead."""
    media = vllm_config.model_config.multimodal_config
    is_cached = media is not None and media.mm_processor_cache_gb > 0
    return bool(vllm_config.cache_config.enable_prefix_caching) or is_cached


class RequestExtras:
    """Encoded extras of one request's chunks.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only; another one may ask for the extras of
    the prompt's chunks, which were read at the start.
    """

    __slots__ = ("_adapter", "_adapters", "_chunk_tokens", "_encoded", "_has_media_hashes", "_request", "reason")

    def __init__(
        self,
        request: Any,
        chunk_tokens: int,
        adapters: Adapters,
        *,
        has_drafts: bool = False,
        has_media_hashes: bool = True,
    ) -> None:
        """Read the request and check all of its prompt at once. Raises nothing: ``is_accountable`` is false instead.

        ``has_drafts``: the engine decodes speculatively. ``has_media_hashes``: vLLM names images, videos and sounds by
        their content (``hashes_media``).
        """
        self._has_media_hashes = has_media_hashes
        self._request = request
        self._chunk_tokens = chunk_tokens
        self._encoded: list[bytes] = []
        self._adapters = adapters
        self._adapter: Adapter | None = None
        self.reason: str | None = None
        try:
            if getattr(request, "resumable", False):
                _check_session(request, has_drafts=has_drafts)
            if request.lora_request is not None:
                self._adapter = adapters.identity(request.lora_request)
            else:
                adapters.check_base()
            self._read_up_to(request.num_tokens // chunk_tokens)
        except Unaccountable as exc:
            self.reason = str(exc)

    def refuse(self, reason: str) -> NoReturn:
        """Leave the request alone from now on.

        Raises:
            Unaccountable: Always.
        """
        self.reason = reason
        raise Unaccountable(reason)

    def read_again(self) -> None:
        """Read the extras of all chunks anew: the request was given more input."""
        self._encoded.clear()

    @property
    def is_accountable(self) -> bool:
        """Whether our extras say everything vLLM's do, as far as the request was looked at."""
        return self.reason is None

    @property
    def may_look_up(self) -> bool:
        """Whether ranks hold, or will load, the request's very adapter, if it has one; may change with every call."""
        return self._adapter is None or self._adapters.may_look_up(self._adapter)

    @property
    def may_store(self) -> bool:
        """Whether every rank has reported the very adapter that the keys name, if they name one."""
        return self._adapter is None or self._adapters.is_held(self._adapter)

    def loses_adapter(self) -> bool:
        """Whether the request is left alone from now on, because its keys do not name what it is computed with."""
        if self.reason is not None:
            return False
        try:
            if self._adapter is None:
                self._adapters.check_base()
            else:
                self._adapters.check(self._adapter)
        except Unaccountable as exc:
            self.reason = str(exc)
        return self.reason is not None

    def extras_for(self, chunk_index: int) -> bytes:
        """Encoded extras of a chunk, for ``PrefixKeys.extend``.

        Raises:
            Unaccountable: The request must be left alone from now on; ``is_accountable`` is then false, too.
        """
        if self.reason is not None:
            raise Unaccountable(self.reason)
        if chunk_index >= len(self._encoded):
            try:
                self._read_up_to(chunk_index + 1)
            except Unaccountable as exc:
                self.reason = str(exc)
                raise
        return self._encoded[chunk_index]

    def extras_of_tail(self, chunk_index: int, tokens: int) -> bytes:
        """Encoded extras of a chunk's first tokens: an image behind them is another turn's, and is not part of it.

        Raises:
            Unaccountable: As for ``extras_for``.
        """
        if self.reason is not None:
            raise Unaccountable(self.reason)
        start = chunk_index * self._chunk_tokens
        try:
            return self._encode(start, start + tokens)
        except Unaccountable as exc:
            self.reason = str(exc)
            raise

    def _read_up_to(self, count: int) -> None:
        """Encode the extras of the first ``count`` chunks. Most requests have none: one check covers all chunks."""
        known = len(self._encoded)
        if count - known > 1 and self._is_plain(known * self._chunk_tokens, count * self._chunk_tokens):
            self._encoded += [b""] * (count - known)
            return
        for index in range(known, count):
            self._encoded.append(self._encode(index * self._chunk_tokens, (index + 1) * self._chunk_tokens))

    def _is_plain(self, start: int, stop: int) -> bool:
        """Whether neither we nor vLLM know an extra of any of these tokens."""
        if self._request.prompt_embeds is not None or any(True for _ in self._typed(start, stop)):
            return False
        theirs, _ = generate_block_hash_extra_keys(self._request, start, stop, 0)
        return not theirs

    def _encode(self, start: int, stop: int) -> bytes:
        ours = list(self._typed(start, stop))
        theirs, _ = generate_block_hash_extra_keys(self._request, start, stop, 0)
        if ours or theirs:
            _compare(ours, theirs or ())
        return encode(ours)

    def _typed(self, start: int, stop: int) -> Iterator[Extra]:
        request = self._request
        if self._adapter is not None:
            yield Lora(self._adapter.identity)
        if start == 0 and request.cache_salt:  # later chunks inherit it: keys are chained
            yield Salt(request.cache_salt)
        for feature in request.mm_features or ():
            position = feature.mm_position
            if position.offset < stop and position.offset + position.length > start:
                if not isinstance(feature.identifier, str):
                    raise Unaccountable(f"multimodal item has no identifier. modality={feature.modality}")
                if not self._has_media_hashes or _COUNTED.search(feature.identifier):
                    raise Unaccountable(
                        "vLLM does not hash images, videos and sounds while both of its caches are off. Leave prefix "
                        f"caching on, or mm_processor_cache_gb above 0. modality={feature.modality}"
                    )
                yield Multimodal(feature.identifier, position.offset)
        if request.prompt_embeds is not None:
            yield Embeds(_embeds_sha256(request, start, stop))


def _check_session(request: Any, *, has_drafts: bool) -> None:
    """Streaming input: a request that goes on with more input when an answer ends, its last token cut off.

    From 0.31 on vLLM goes on from what is computed for good. Before, it counts a step that is still in flight, and
    takes that step's token for input: what it computes then is not what its tokens say.

    Where drafts are decoded the same happens in every version up to 0.32: an answer that ends amid accepted drafts
    leaves more tokens computed than there are, and the next input's first tokens are taken for computed.

    Raises:
        Unaccountable: What is computed for the session's tokens may not be theirs.
    """
    if release(vllm.__version__, OLDEST) < SESSIONS_FROM:
        first = ".".join(map(str, SESSIONS_FROM))
        raise Unaccountable(f"streaming input needs vLLM {first} or later. observed={vllm.__version__}")
    if request.prompt_embeds is not None:
        raise Unaccountable("streaming input with prompt embeddings is not supported")
    if has_drafts:
        raise Unaccountable("streaming input with speculative decoding is not supported: vLLM's KV of it may be wrong")


def _embeds_sha256(request: Any, start: int, stop: int) -> bytes:
    """Hash a chunk's embeddings and the positions that take them; after the prompt there are none."""
    rows = request.prompt_embeds[start:stop].detach().cpu().contiguous()
    mask = getattr(request, "prompt_is_token_ids", None)
    digest = hashlib.sha256(f"{rows.dtype} {tuple(rows.shape)} ".encode())
    digest.update(b"all" if mask is None else bytes(map(bool, mask[start:stop])))
    digest.update(b" ")
    digest.update(rows.flatten().view(torch.uint8).numpy())
    return digest.digest()


def _compare(ours: Sequence[Extra], theirs: Sequence[Any]) -> None:
    observed = Counter(map(_signature, theirs))
    if observed not in [Counter(kinds[type(extra)] for extra in ours) for kinds in (_TAGGED, _UNTAGGED)]:
        expected = Counter(type(extra).__name__ for extra in ours)
        raise Unaccountable(f"vLLM hashes something unknown. ours={dict(expected)} vllm={dict(observed)}")


def _signature(key: Any) -> str:
    """Kind of one of vLLM's extra keys; never its value, which may be a secret."""
    if not isinstance(key, tuple):
        return type(key).__name__
    if len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int):
        return "identifier,offset"
    tag = key[0] if key and isinstance(key[0], str) else "?"
    return f"{tag if tag.isidentifier() else '?'}/{len(key)}"
