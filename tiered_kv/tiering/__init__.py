"""Policy as a pure state machine: which chunk is where, what moves next, what is evicted. No I/O, clock or threads."""
