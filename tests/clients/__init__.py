"""Real clients, unmodified, against a served process; `make test-clients` runs them in an environment of their own."""
