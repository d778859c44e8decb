"""Servers that share a bucket, in virtual time."""
