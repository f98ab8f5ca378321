"""From a model reference to files, and from files to facts: resolve, layout, families, weights."""
