"""vLLM's general plugin: makes ``kv_connector="TieredKVConnector"`` known without a module path."""

import contextlib

NAME = "TieredKVConnector"


def register() -> None:
    """Register the connector and watch what vLLM loads; called by vLLM in every process. Idempotent."""
    # vLLM loads plugins while it is still being imported: at the top this would be a circle.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    from tiered_kv.vllm.loads import watch_loaders  # noqa: PLC0415

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, "tiered_kv.vllm.connector", NAME)
    watch_loaders()
