"""The connector for vLLM; no other package of tiered_kv imports vllm.

``kv_connector_module_path="tiered_kv.vllm"`` finds :class:`TieredKVConnector` here; it is imported on first use,
because vLLM loads plugins of this package before it is fully imported itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.vllm.connector import TieredKVConnector

__all__ = ["TieredKVConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tiered_kv.vllm import connector  # noqa: PLC0415 - see above

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
