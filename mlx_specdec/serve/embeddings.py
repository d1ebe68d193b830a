"""OpenAI's embeddings, and the task that computes embeddings for other clients, too."""

import base64
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from ..engine.embeddings import Vector, embed
from ..engine.memory import Extent
from ..text.prompts import prompt_ids
from .answer_models import EmbeddingsAnswer
from .answers import Payload
from .bodies import Body, Fields, String
from .models import Count, Prompt
from .problems import invalid, too_long
from .requests import RequestParser, several
from .service import Endpoint
from .tasks import EngineTask


class EmbeddingsRequest(Fields):
    """The body of /v1/embeddings."""

    model: String | None = None
    input: Annotated[
        Prompt, Field(description="a string, a list of token ids, or a list of either")
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None


def embeddings(parser: RequestParser, body: Body) -> EngineTask:
    """Return the task of a checked body. Raises Problem and PromptError."""

    def answer(prompt_tokens: int, vectors: Sequence[Vector]) -> Payload:
        in_base64 = body.get("encoding_format") == "base64"
        written = [
            base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if in_base64
            else vector.tolist()
            for vector in vectors
        ]
        return {
            "object": "list",
            "model": parser.name,
            "data": [
                {"object": "embedding", "index": at, "embedding": vector}
                for at, vector in enumerate(written)
            ],
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }

    return task_of(parser, body, "input", answer)


def task_of(
    parser: RequestParser,
    body: Body,
    field: str,
    answer: Callable[[int, Sequence[Vector]], Payload],
    *,
    shortens: bool = False,
) -> EngineTask:
    """Return the task of embedding the texts in a field of a checked body.

    Args:
        answer: Returns the body of the answer for the number of tokens and the vectors.
        shortens: Whether the end of a text that does not fit is left out, instead of an error.
    Raises:
        Problem, PromptError: If a text cannot be embedded.
    """
    inputs, most = several(body[field]), parser.settings.limits.inputs
    width, wanted = parser.pair.target.width, body.get("dimensions")
    if wanted not in (None, width):
        message = f"dimensions must be {width}, the width of this model: leave it out"
        raise invalid(message, "dimensions")
    if len(inputs) > most:
        raise invalid(f"{field} has {len(inputs)} texts, and at most {most} are taken", field)
    longest = fits = parser.longest
    if parser.budget is not None:
        fits = parser.budget.longest_prompt(longest)
    advice = "shorten it" if fits == longest else "shorten it, or raise memory-budget"
    texts = []
    for text in inputs:
        if isinstance(text, str):
            text = text[: parser.most_characters] if shortens else text
            parser.check_characters(text, field)
            text = prompt_ids(parser.pair.tokenizer, text, chat_template=False)
        parser.check_ids(text, field)
        text = text[:fits] if shortens else text
        if len(text) > fits:
            raise too_long(field, len(text), fits, fits, advice)
        texts.append(text)
    count, nbytes = sum(map(len, texts)), _nbytes(parser, texts)
    return EngineTask(embed(parser.pair, texts), nbytes, functools.partial(answer, count), count)


def _nbytes(parser: RequestParser, texts: Sequence[Sequence[int]]) -> int:
    """Return the bytes that the longest text needs."""
    longest, budget = max(texts, key=len), parser.budget
    if budget is None:
        return 0
    cached = len(parser.pair.target.prefix(longest))
    rows = [Extent(len(longest), cached, cached)]
    return budget.of_caches(rows) + budget.of_prefill(rows)


ENDPOINTS = (
    Endpoint("/v1/embeddings", embeddings, EmbeddingsAnswer, "Embeds texts", EmbeddingsRequest),
)
