"""Runners: one checkpoint on one device."""
