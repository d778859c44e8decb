"""vLLM's general plugin: registers the connector under its name, and joins our tier to vLLM's own offloading.

So ``kv_connector="TieredKVConnector"`` needs no module path.
"""

import contextlib
from typing import Any

NAME = "TieredKVConnector"


def register() -> None:
    """Register the connector and wrap vLLM's loaders; vLLM calls it in every process. Idempotent."""
    # vLLM loads plugins while it is still being imported: at the top this would be a circle.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    from tiered_kv.vllm.compat import after_connector_is_made  # noqa: PLC0415
    from tiered_kv.vllm.identity.loader_watch import watch_loaders  # noqa: PLC0415

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, "tiered_kv.vllm.connector", NAME)
    watch_loaders()
    after_connector_is_made(_join_offloading)


def _join_offloading(connector: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    """Where vLLM's own offloading names a tier of ours, have it joined to the engine."""
    if type(connector).__name__ != "OffloadingConnector":
        return
    from tiered_kv.vllm.offloading import join_offloading  # noqa: PLC0415 - needs all of vLLM's offloading

    join_offloading(connector, vllm_config, role, kv_cache_config)
