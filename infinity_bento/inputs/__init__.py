"""From what callers send to tokens."""
