"""Samples that tests feed in: values and bytes, no behaviour."""
