"""The cache's own engine in virtual time, judged by a dictionary: see docs/simulation.md.

Not the engine simulator (``tests.sim.vllm``), which runs vLLM's schedulers around the connector.
"""
