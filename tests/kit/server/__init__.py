"""Servers as processes of their own, clients of them without vLLM, and what they show from outside."""
