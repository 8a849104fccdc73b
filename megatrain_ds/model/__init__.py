"""Units of a model: discovery, ties, streamed parameters, and the binding of weights to a module."""
