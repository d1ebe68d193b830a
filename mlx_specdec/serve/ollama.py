"""ollama's API, for clients that know no other. Streams are lines of JSON."""

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field

from ..engine.embeddings import Vector
from ..results import Step
from ..text.messages import Message
from .engine import EngineTask
from .events import Event, by_kind
from .fields import Body, Boolean, Object, Refused, Several, either
from .internal import Chat, Count, Limit, Sampled, TextConstraint, ToolChoice, Tools, Wanted
from .openai import embedding_task
from .problems import Problem, invalid
from .registry import Registry, ServedModel
from .requests import CompletionBody, LoadedModel, Prepared
from .service import Choice, Payload, Writer, post, registry_of, respond, streamed
from .shared_bodies import ChatMessage, Function, Thoughtful

VERSION = "0.12.6"
"""The version of ollama whose API this is. Some clients refuse old ones."""
FOREVER = datetime.max.replace(tzinfo=UTC, microsecond=0)
"""The time of expiry that is reported for a model that stays until another needs its memory."""
LONGEST_KEPT = 1e9
"""If a model is kept for more seconds than these, FOREVER is reported."""
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(-?[\d.]+)(ms|s|m|h)?")
router = APIRouter(prefix="/api")


# Bodies.
def _seconds(keep_alive: object) -> float:
    """Return a duration in seconds, infinite if it is negative. Raises ValueError.

    Args:
        keep_alive: Seconds, also as a text, or a text such as "5m".
    """
    found = DURATION.fullmatch(str(keep_alive))
    if found is None:
        raise ValueError('keep_alive must be seconds, or a text such as "5m"')
    seconds = float(found[1]) * UNITS[found[2] or "s"]
    return math.inf if seconds < 0 else seconds


class GenerationOptions(Sampled):
    # Without a limit, only the context limits an answer.
    max_tokens: Limit = Field(-1, validation_alias="num_predict")


class LoadingRequest(Body):
    """Fields of requests for which the model is loaded. keep_alive: Seconds for which it is kept,
    or None to leave them unchanged. The service reads it."""

    options: GenerationOptions = Field(default_factory=GenerationOptions.model_construct)
    keep_alive: Annotated[float | None, BeforeValidator(_seconds)] = None


class WritingRequest(LoadingRequest, CompletionBody):
    """Fields of /api/chat and /api/generate."""

    refused: ClassVar[Refused] = {"logprobs": (False,), "top_logprobs": (0,), "images": ([],)}
    stream: Boolean = True
    format: Literal["", "json"] | Object = ""
    think: Boolean | Literal["low", "medium", "high", None] = None

    def chat(self, messages: Sequence[Message], tools: Tools) -> Chat:
        """Return a conversation."""
        name = "reasoning_effort" if isinstance(self.think, str) else "enable_thinking"
        return Thoughtful.model_validate({name: self.think}).chat_of(messages, tools)

    def wanted(self) -> Wanted:
        """Return the wishes of the client, except for the prompt."""
        schema = {"type": "object"} if self.format == "json" else self.format
        constraint = TextConstraint("json_schema", schema, "format")
        return Wanted(self.options, [constraint] if schema else [])


class OllamaMessage(ChatMessage):
    content: str = ""
    images: Several[str] = []  # noqa: RUF012
    name: str | None = either(None, "tool_name", "name")

    def message(self) -> Message:
        message = super().message()
        if self.images:
            text = {"type": "text", "text": self.content}
            message["content"] = [text, *({"type": "image"} for _ in self.images)]
        return message


class OllamaChatRequest(WritingRequest):
    """The body of /api/chat."""

    messages: Several[OllamaMessage] = []  # noqa: RUF012
    tools: Several[Function] = []  # noqa: RUF012

    def prepared(self, model: LoadedModel) -> Prepared:
        messages = [message.message() for message in self.messages]
        tools = Tools.of([tool.tool for tool in self.tools], ToolChoice())
        return model.chat(self.chat(messages, tools), self.wanted())


class OllamaGenerateRequest(WritingRequest):
    """The body of /api/generate."""

    refused: ClassVar[Refused] = {**WritingRequest.refused, "context": ([],), "template": ("",)}
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: Boolean = False

    def prepared(self, model: LoadedModel) -> Prepared:
        prompt, system = self.prompt, self.system
        if model.way == "template" and not (self.raw or self.suffix):
            before = [{"role": "system", "content": system}] if system else []
            messages = [*before, {"role": "user", "content": prompt}]
            return model.chat(self.chat(messages, Tools()), self.wanted())
        text = prompt if self.raw or not system else f"{system}\n\n{prompt}"
        return model.texts([text], self.wanted(), suffix=self.suffix)


class EmbedRequest(LoadingRequest):
    """The body of /api/embed."""

    input: str | Several[str] = []  # noqa: RUF012
    truncate: Boolean = True
    dimensions: Count | None = None


# Answers.
def _durations(load_seconds: float, began: float) -> dict[str, int]:
    """Return the durations of a request in nanoseconds. began: The time at which the model was
    loaded."""
    total_seconds = load_seconds + time.perf_counter() - began
    return {"total_duration": int(1e9 * total_seconds), "load_duration": int(1e9 * load_seconds)}


def _time(when: datetime | None = None) -> str:
    return (when or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


def _content(body: WritingRequest, events: Sequence[Event]) -> Payload:
    """Return the fields of an answer with texts and calls."""
    content, reasoning, calls = by_kind(events)
    thinking = {"thinking": reasoning} if reasoning else {}
    if isinstance(body, OllamaGenerateRequest):
        return {"response": content, **thinking}
    listed = []
    for call in calls:
        function = {"name": call.name, "arguments": json.loads(call.text)}
        listed.append({"id": call.id, "function": {"index": call.index, **function}})
    called = {"tool_calls": listed} if listed else {}
    return {"message": {"role": "assistant", "content": content, **thinking, **called}}


class OllamaWriter(Writer):
    """Writes a message of a chat, or a generated text."""

    media = "application/x-ndjson"
    body: WritingRequest

    def __init__(self, model: LoadedModel, body: WritingRequest) -> None:
        self._load_seconds, self._began = model.load_seconds, time.perf_counter()
        super().__init__(model, body)

    def encoded(self, payload: Payload) -> bytes:
        return json.dumps(payload).encode() + b"\n"

    def silence(self) -> bytes:
        return b""  # a line that is no JSON object would be an error

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        return problem.status, {"error": problem.message}

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> list[Payload]:
        return [{**self._written([event]), "done": False} for event in events]

    def _written(self, events: Sequence[Event]) -> Payload:
        return {"model": self.model, "created_at": _time(), **_content(self.body, events)}

    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        took = None if choice.result is None else choice.result.stats.seconds
        return {
            **self._written(events),
            "done": True,
            "done_reason": "stop" if choice.complete else "length",
            "prompt_eval_count": self.prepared.prompt_tokens,
            "prompt_eval_duration": int(1e9 * took.prompt) if took else 0,
            "eval_count": choice.tokens,
            "eval_duration": int(1e9 * took.decoding) if took else 0,
            **_durations(self._load_seconds, self._began),
        }


# Routes.
async def _answered(http: Request, body: WritingRequest, *, empty: bool) -> Response:
    """Answer a request, or load or unload its model if it is empty. Raises Problem."""
    if not empty:
        return await respond(http, body, OllamaWriter)
    ended = {"created_at": _time(), **_content(body, ()), "done": True}
    registry = registry_of(http)
    if body.keep_alive is not None and body.keep_alive <= 0:
        model = registry.find(body.model)
        registry.unload(model)
        return JSONResponse({"model": model.name, **ended, "done_reason": "unload"})
    loaded = {**ended, "done_reason": "load"}
    return await respond(http, body, lambda model, _: {"model": model.name, **loaded})


@router.post(
    "/chat", summary="Answers messages of ollama's clients", responses=streamed(OllamaWriter)
)
async def chat(body: OllamaChatRequest, http: Request) -> Response:
    return await _answered(http, body, empty=not body.messages)


@router.post(
    "/generate",
    summary="Answers a prompt of ollama's clients",
    responses=streamed(OllamaWriter),
)
async def generate(body: OllamaGenerateRequest, http: Request) -> Response:
    """Answer a prompt, or continue a text."""
    return await _answered(http, body, empty=not (body.prompt or body.suffix))


def _embedded(model: LoadedModel, body: EmbedRequest) -> EngineTask:
    """Return the task of a body, which only loads the model if it has no text. A blank text is not
    embedded. Its embedding is 0, so that it does not refuse the others. Raises Problem and
    PromptError."""
    began = time.perf_counter()
    inputs = body.input
    if isinstance(inputs, str):
        inputs = [inputs] if inputs else []
    texts = [text.strip() and text for text in inputs]

    def answer(count: int, vectors: Sequence[Vector]) -> Payload:
        rest, zeros = iter(vectors), [0.0] * model.pair.target.width
        found = [next(rest).tolist() if text else zeros for text in texts]
        figures = {"model": model.name, "prompt_eval_count": count}
        return {"embeddings": found, **figures, **_durations(model.load_seconds, began)}

    return embedding_task(
        model,
        [text for text in texts if text],
        answer,
        dimensions=body.dimensions,
        shortens=body.truncate,
    )


post(router, "/embed", EmbedRequest, _embedded, "Embeds texts")


def _described(registry: Registry, model: ServedModel) -> Payload:
    facts = model.facts
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(datetime.fromtimestamp(registry.created, UTC)),
        "size": model.nbytes,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": {
            "format": "mlx",
            "family": facts.family,
            "families": [facts.family] if facts.family else [],
            "parameter_size": "",
            "quantization_level": facts.dtype,
        },
    }


@router.get("/tags", summary="Lists all models")
async def tags(http: Request) -> Payload:
    registry = registry_of(http)
    return {"models": [_described(registry, model) for model in registry.models]}


@router.get("/ps", summary="Lists the models in memory")
async def running(http: Request) -> Payload:
    registry, now = registry_of(http), datetime.now(UTC)
    models = []
    for model in registry.models:
        if model.state != "loaded":
            continue
        left = model.keep - (0.0 if model.busy else registry.clock() - model.used)
        kept = FOREVER if left > LONGEST_KEPT else now + timedelta(seconds=max(0.0, left))
        figures = {"size_vram": model.nbytes, "context_length": model.facts.longest}
        models.append({**_described(registry, model), **figures, "expires_at": _time(kept)})
    return {"models": models}


@router.post("/show", summary="Describes a model")
async def show(body: Body, http: Request) -> Payload:
    """Describe a model. Its abilities are known from the first time it is loaded."""
    registry = registry_of(http)
    model = registry.find(body.model)
    described, facts = _described(registry, model), model.facts
    about: Payload = {"general.basename": model.name}
    if facts.family:
        about |= {"general.architecture": facts.family}
        about[f"{facts.family}.context_length"] = facts.longest
    return {
        "modified_at": described["modified_at"],
        "details": described["details"],
        "model_info": about,
        "capabilities": facts.capabilities,
    }


@router.get("/version", summary="The version of ollama's API")
async def version() -> Payload:
    return {"version": VERSION}


@router.post("/pull", summary="Not supported")
@router.post("/push", summary="Not supported")
@router.post("/create", summary="Not supported")
@router.post("/copy", summary="Not supported")
@router.delete("/delete", summary="Not supported")
async def refuse(http: Request) -> Payload:
    """Refuse to change the models of this server. Raises Problem."""
    names = registry_of(http).names
    raise invalid(
        f"{http.url.path} is not supported, because this server does not change its models: ask "
        f"for {names:.1000}, or start it with another --model NAME, which is downloaded if "
        "necessary"
    )
