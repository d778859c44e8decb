"""tiered_kv: a tiered KV cache for LLM serving (see docs/architecture.md).

``TieredKVConnector`` (for vLLM) is in :mod:`tiered_kv.vllm`; :class:`Cache` is for everybody else.
"""

from typing import TYPE_CHECKING, Any

from tiered_kv.version import __version__

if TYPE_CHECKING:
    from tiered_kv.cache import Cache

__all__ = ["Cache", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Cache":
        from tiered_kv.cache import Cache  # noqa: PLC0415 - on first use: importing the package stays cheap

        return Cache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
