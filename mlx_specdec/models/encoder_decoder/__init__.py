"""The base classes of all encoder-decoder families: networks, contexts, loading and training."""
