"""Backbones: packed batches in, hidden states out. Never imports heads."""
