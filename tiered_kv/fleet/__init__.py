"""Capacity, expiry and recency of a bucket that many servers share: one of them leads, the others ask it for bytes.

Why it is safe without transactions or fencing: docs/decisions/0007-bucket-capacity.md. Front door: ``keeper.py``.
"""
