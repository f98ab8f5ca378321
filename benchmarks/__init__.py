"""Benchmarks with fixed seeds; run them from the repository root, for example ``python -m benchmarks.http --help``."""
