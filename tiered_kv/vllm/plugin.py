"""vLLM's general plugin: registers the connector under its name.

So ``kv_connector="TieredKVConnector"`` needs no module path.
"""

import contextlib

NAME = "TieredKVConnector"


def register() -> None:
    """Register the connector and wrap vLLM's loaders; vLLM calls it in every process. Idempotent."""
    # vLLM loads plugins while it is still being imported: at the top this would be a circle.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    from tiered_kv.vllm.identity.loader_watch import watch_loaders  # noqa: PLC0415

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, "tiered_kv.vllm.connector", NAME)
    watch_loaders()
