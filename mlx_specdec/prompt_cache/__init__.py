"""Beginnings of texts that need not be computed again: a radix tree over tokens, and its file."""
