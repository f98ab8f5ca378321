"""Decision protocols: how each published family writes questions as tokens and reads answers from hidden states."""
