"""Bodies of ollama's API."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictInt

from .bodies import Boolean, Fields, Number, Object, String, integral, worded
from .contents import Reasoned
from .models import (
    Count,
    EarlierCall,
    Penalty,
    Repetition,
    Role,
    Sampled,
    Stop,
    Stops,
    ToolList,
)
from .problems import invalid

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
DURATION = re.compile(rf"[+-]?(?:{PART.pattern})+")


class GenerationOptions(Sampled):
    same: ClassVar[Mapping[str, str]] = {"repeat_penalty": "repetition_penalty"}
    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        "mirostat": (0,),
        **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
    }
    num_predict: (
        Annotated[
            StrictInt,
            Field(ge=-2),
            integral,
            worded("a whole number from 0 on, or -1 or -2 for no limit", inside=True),
        ]
        | None
    ) = None
    num_ctx: Count | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repeat_penalty: Repetition | None = None
    repeat_last_n: Annotated[StrictInt, Field(ge=-1), integral] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | Stops | None = None


class LoadingRequest(Fields):
    """Fields of requests for which the model is loaded."""

    model: String | None = None
    options: GenerationOptions | None = None
    keep_alive: Annotated[Number | String, worded('seconds, or a text such as "5m"')] | None = None


class WritingRequest(LoadingRequest):
    """Fields of /api/chat and /api/generate."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "images": ([],),
    }
    stream: Boolean | None = None
    format: (
        Annotated[Literal["", "json"] | Object, worded('"json" or a JSON schema, an object')] | None
    ) = None
    think: (
        Annotated[
            Boolean | Literal["low", "medium", "high"],
            worded('true, false, "low", "medium" or "high"'),
        ]
        | None
    ) = None


class OllamaMessage(Reasoned):
    role: Role
    content: String | None = None
    images: list[String] | None = None
    tool_name: String | None = None
    tool_calls: list[EarlierCall] | None = None


class OllamaChatRequest(WritingRequest):
    """The body of /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: ToolList | None = None


class OllamaGenerateRequest(WritingRequest):
    """The body of /api/generate."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **WritingRequest.refused,
        "context": ([],),
        "template": ("",),
    }
    prompt: String | None = None
    suffix: String | None = None
    system: String | None = None
    raw: Boolean | None = None


class EmbedRequest(LoadingRequest):
    """The body of /api/embed, with `input`, and of the older /api/embeddings, with `prompt`."""

    input: String | list[String] | None = None
    prompt: String | None = None
    truncate: Boolean | None = None
    dimensions: Count | None = None


class ShowRequest(Fields):
    """The body of /api/show. name: Older clients send it in place of `model`."""

    model: String | None = None
    name: String | None = None


def seconds_of(keep_alive: float | str) -> float:
    """Return a duration in seconds, infinite if it is negative. Raises Problem.

    Args:
        keep_alive: Seconds, also as a text, or a text such as "1h30m".
    """
    text = str(keep_alive).strip()
    if DURATION.fullmatch(text):
        found = sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
        seconds = -found if text.startswith("-") else found
    else:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
    if math.isnan(seconds):
        message = f'keep_alive must be seconds, or a text such as "5m", not {text[:40]!r}'
        raise invalid(message, "keep_alive")
    return math.inf if seconds < 0 else seconds
