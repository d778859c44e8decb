"""Identity of KV: an engine's namespace, and the identity of its LoRA adapters.

``record.py`` collects the fields of the namespace, ``canonical.py`` writes any value in one form, ``config_values.py``
reads vLLM's settings by the table in ``config_fields.py``, ``model_files.py`` names weights and the files beside them
by what ``loader_watch.py`` saw vLLM read, ``adapters.py`` does the same for LoRA adapters, ``file_digests.py`` hashes
files. Nothing here reads KV tensors.
"""
