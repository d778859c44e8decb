"""Figures as people read them: counts, shares, rates, durations, and what a breaker or a bucket's keeper says."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tiered_kv.config import size_text

if TYPE_CHECKING:
    from tiered_kv.metrics.figures import TierFigures, TokenFigures

BREAKER = {"closed": "in use", "open": "left out", "half_open": "left out, being tried"}


def count_text(count: float) -> str:
    """A count: ``940``, ``12.3k``, ``1.2M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size * 0.9995:
            return f"{count / size:.1f}".removesuffix(".0") + unit
    return f"{count:.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def share_text(part: float, whole: float) -> str:
    """A share: ``75 %``; ``-`` of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def rate_text(bytes_per_s: float | None) -> str:
    """Bytes per second; empty where nobody knows, or nothing moved."""
    return f"{size_text(int(bytes_per_s))}/s" if bytes_per_s else ""


def time_text(seconds: float | None) -> str:
    """A duration of an operation: ``340 us``, ``12.5 ms``, ``1.2 s``; empty where there was none."""
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def capacity_text(size_bytes: int | None) -> str:
    """A limit, or that there is none."""
    return "unbounded" if size_bytes is None else size_text(size_bytes)


def tokens_text(tokens: "TokenFigures") -> str:
    """The hit rate in one line."""
    if not tokens.asked_tokens:
        return "none asked yet"
    shares = ", ".join(f"{share_text(hit.tokens, tokens.asked_tokens)} {hit.tier}" for hit in tokens.hits)
    share = share_text(tokens.hit_tokens, tokens.asked_tokens)
    return f"{count_text(tokens.asked_tokens)} asked, {count_text(tokens.hit_tokens)} hit ({share}): {shares}"


def decisions_text(counts: Mapping[str, str]) -> str:
    """What became of lookups in one line: ``12 ready, 3 not awaited``."""
    return ", ".join(f"{count} {decision.replace('_', ' ')}" for decision, count in counts.items()) or "none yet"


def admission_text(tier: "TierFigures") -> str:
    """How much of what came was worth a write; empty where everything is."""
    if not tier.declined_chunks:
        return ""
    return f"{count_text(tier.admitted_chunks)} chunks admitted, {count_text(tier.declined_chunks)} declined"


def state_text(tier: "TierFigures") -> str:
    """What the breaker says, and who keeps a shared bucket within its limits."""
    parts = [BREAKER.get(tier.breaker or "", ""), tier.breaker_reason or ""]
    if tier.bucket is not None:
        parts.append(f"bucket: {tier.bucket.role}" + (f", term {tier.bucket.term}" if tier.bucket.term else ""))
    return "; ".join(part for part in parts if part)
