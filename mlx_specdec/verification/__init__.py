"""Rules: which guesses stay. None of them knows who made the guess."""
