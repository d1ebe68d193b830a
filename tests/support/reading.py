"""Contexts that have read their prompt, as decoding reads it."""

from collections.abc import Sequence

from mlx_specdec.decoding.loop import PromptReader
from mlx_specdec.interfaces import Context, Model


def read(model: Model, prompt: Sequence[int]) -> Context:
    """A context that has seen all of the prefix but its last token."""
    context = model.open(prompt)
    reader = PromptReader(context, [model.prefix(prompt)], [prompt])
    while not reader.done:
        reader.step()
    return context
