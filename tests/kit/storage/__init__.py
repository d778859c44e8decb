"""Stored prompts on any medium, and what a directory or a bucket looks like from outside."""
