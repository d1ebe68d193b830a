"""T5, mT5, UMT5, ByT5 and MADLAD-400."""
