"""What all encoder-decoder families share: sources, contexts, loading, outlines, training."""
