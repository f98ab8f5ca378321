"""Output heads: packed hidden states in, one row per sequence out. Never imports models."""
