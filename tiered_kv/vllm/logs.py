"""Our log lines in vLLM's log."""

import logging


def show_our_logs() -> None:
    """vLLM configures its own loggers only: give ours its handlers, once, unless the application has done so."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
