"""Per-instance patches for the few families whose attention must be taught packing; modules and weights stay."""
