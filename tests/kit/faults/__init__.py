"""Faults: of requests to a store, of system calls, of messages, and servers that are killed."""
