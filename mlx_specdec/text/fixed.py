"""A fixed text for judging what a conversion cost: sentences of our own, in three manners.

Nothing here is quoted from anywhere. Changing a word changes every perplexity that was reported.
"""

from __future__ import annotations

PAIRS = (
    (
        "translate English to French: The bridge over the river was closed after the storm.",
        "Le pont sur la rivière a été fermé après la tempête.",
    ),
    (
        "translate English to French: My sister keeps three bicycles in a very small garage.",
        "Ma sœur garde trois vélos dans un tout petit garage.",
    ),
    (
        "translate English to French: Please bring the blue folder to the meeting on Tuesday.",
        "Veuillez apporter le dossier bleu à la réunion de mardi.",
    ),
    (
        "summarize: The bakery on the corner opened at six. By seven the queue reached the square, "
        "and by eight there was no bread left, only the smell of it.",
        "The bakery on the corner sold all of its bread within two hours.",
    ),
    (
        "question: Why did the train stop? context: A tree had fallen on the line near the tunnel, "
        "so the train waited at the last station until the track was clear.",
        "A tree had fallen on the line.",
    ),
)
"""(input of the encoder, what the decoder is to say), for encoder-decoder models."""

PASSAGE = (
    "The lighthouse keeper counted the ships every evening and wrote the number in a green book. "
    "On clear days there were about thirty; in winter, when the ice came down from the north, "
    "there were two or three. He never learned where they went, but he noticed that the same "
    "captains waved at the same rocks, year after year.\n\n"
    "To add two fractions, bring them to a common denominator, add the numerators and keep the "
    "denominator. One half and one third make five sixths, because three sixths and two sixths "
    "are five of the same parts.\n\n"
    "def mean(values):\n"
    '    """The arithmetic mean of a list of numbers."""\n'
    "    total = 0.0\n"
    "    for value in values:\n"
    "        total += value\n"
    "    return total / len(values)\n"
)
"""For decoder-only models."""
