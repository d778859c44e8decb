"""``make gpu-e2e``: a real vLLM behind the cache, mode by mode, with a verdict for each.

A mode is a way to run vLLM: eager or with CUDA graphs, an attention backend, a dtype of the KV, a model runner. In each
three engines are started one after the other (``engine_process.py``): plain vLLM; one that computes a prompt and
answers it again from host memory; one that finds it on disk. ``runner.py`` starts them, judges and keeps
what came out; ``modes.py`` names the modes. On a machine without a GPU the modes of vLLM's CPU build are run, which is
the test of these programs and shows nothing about a GPU.
"""
