"""The wire: one dialect per file, all ending in ``Engine.submit``. Never imports torch."""
