"""OpenAI's embeddings, and the task that computes embeddings for other clients, too."""

import base64
import functools
from collections.abc import Callable, Sequence
from typing import Literal

from fastapi import APIRouter

from ..engine.embeddings import Vector, embed
from ..text.prompts import prompt_ids
from .engine import EngineTask
from .fields import Body
from .internal import Count
from .openai import Prompt, several
from .problems import invalid, too_long
from .requests import LoadedModel
from .service import Payload, post, run

router = APIRouter()


class EmbeddingsRequest(Body):
    """The body of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None


def embedded(model: LoadedModel, body: EmbeddingsRequest) -> EngineTask:
    """Return the task of a body. Raises Problem and PromptError."""

    def answer(prompt_tokens: int, vectors: Sequence[Vector]) -> Payload:
        data = []
        for at, vector in enumerate(vectors):
            packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            numbers = packed if body.encoding_format == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": at, "embedding": numbers})
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        return {"object": "list", "model": model.name, "data": data, "usage": usage}

    return task_of(model, several(body.input), answer, dimensions=body.dimensions)


def task_of(
    model: LoadedModel,
    inputs: Sequence[str | list[int]],
    answer: Callable[[int, Sequence[Vector]], Payload],
    *,
    dimensions: int | None = None,
    shortens: bool = False,
) -> EngineTask:
    """Return the task of embedding texts.

    Args:
        inputs: The texts, which are in the field `input` of the body.
        answer: Returns the body of the answer for the number of tokens and the vectors.
        dimensions: The width of the vectors that the client expects, or None.
        shortens: Whether the end of a text that does not fit is left out, instead of an error.
    Raises:
        Problem, PromptError: If a text cannot be embedded.
    """
    width = model.pair.target.width
    if dimensions not in (None, width):
        message = f"dimensions must be {width}, the width of this model: leave it out"
        raise invalid(message, "dimensions")
    longest, budget = model.longest, model.budget
    fits = longest if budget is None else budget.longest_prompt(longest)
    advice = "shorten it" if fits == longest else "shorten it, or raise memory-budget"
    texts = []
    for text in inputs:
        if isinstance(text, str):
            text = text[: model.most_characters] if shortens else text
            model.check_characters(text, "input")
            text = prompt_ids(model.pair.tokenizer, text, chat_template=False)
        model.check_ids(text, "input")
        text = text[:fits] if shortens else text
        if len(text) > fits:
            raise too_long("input", len(text), fits, fits, advice)
        texts.append(text)
    count, longest = sum(map(len, texts)), max(map(len, texts), default=0)
    nbytes = budget.alone(longest, 0) if budget is not None and longest else 0
    return EngineTask(embed(model.pair, texts), nbytes, functools.partial(answer, count), count)


post(router, "/embeddings", EmbeddingsRequest, embedded, "Embeds texts", run)
