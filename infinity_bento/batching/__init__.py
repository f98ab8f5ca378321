"""From single items to packed batches: the FIFO queue under a token budget, and the packed layout."""
