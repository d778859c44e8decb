"""What tests share: worlds to act in, processes to start, faults to inject, samples to feed in."""
