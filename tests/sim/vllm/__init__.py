"""vLLM's schedulers and aggregation around the connector, with simulated workers: see docs/simulator.md."""
