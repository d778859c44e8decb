"""The sections, one module each: ``run(proof)`` measures and checks (``section.py``)."""
