"""Metrics, logging and the start-up report; each thing declared once."""
