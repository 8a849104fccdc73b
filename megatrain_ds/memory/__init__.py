"""Host memory: layouts, arenas, streams, and the store of weights, gradients and optimizer state."""
