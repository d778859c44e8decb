"""Real vLLM engines on small models, and what versions of vLLM declare."""
