"""Attention over packed sequences: one function that transformers calls, and the backends behind it."""
