"""Proposers: who guesses tokens, and from what. None of them knows how guesses are judged."""
