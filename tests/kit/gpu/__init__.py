"""A GPU without a GPU: streams, events and memory whose races are found, whatever the timing would have been."""
