"""ollama's API, for clients that know no other. Streams are lines of JSON."""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, Field, StrictInt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine.embeddings import Vector
from ..text.messages import Message
from .answers import Choice, Payload, Writer
from .embeddings import task_of
from .engine import EngineTask
from .events import Arguments, Call, Event, Text
from .fields import MESSAGES, Body, Boolean, Number, Object, Several, String, integral, worded
from .internal import Chat, Count, Sampled, TextConstraint, ToolChoice, Tools, Wanted
from .openai_bodies import ToolList
from .problems import Problem, invalid
from .registry import ServedModel
from .requests import LoadedModel, Prepared
from .service import Service, complete, compute, run, service_of
from .shared_bodies import SWITCHES, EarlierCall, Reasoned, Role, constraint_of

NDJSON = "application/x-ndjson"
VERSION = "0.12.6"
"""The version of ollama whose API this is. Some clients refuse old ones."""
FOREVER = datetime.max.replace(tzinfo=UTC, microsecond=0)
"""The time of expiry that is reported for a model that stays until another needs its memory."""
LONGEST_KEPT = 1e9
"""If a model is kept for more seconds than these, FOREVER is reported."""
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
DURATION = re.compile(rf"[+-]?(?:{PART.pattern})+")
router = APIRouter(prefix="/api")


# Bodies.
class GenerationOptions(Sampled):
    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        "mirostat": (0,),
        **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
    }
    # Without a limit, only the context limits an answer.
    max_tokens: Annotated[
        StrictInt,
        Field(ge=-2),
        integral,
        worded("a whole number from 0 on, or -1 or -2 for no limit", inside=True),
    ] = Field(-1, validation_alias="num_predict")
    num_ctx: Count | None = None


class LoadingRequest(Body):
    """Fields of requests for which the model is loaded."""

    options: GenerationOptions = Field(default_factory=GenerationOptions.model_construct)
    keep_alive: Annotated[Number | String, worded('seconds, or a text such as "5m"')] | None = None

    def kept(self) -> float | None:
        """Return the seconds for which the model is kept, or None to leave them unchanged. Raises
        Problem."""
        return None if self.keep_alive is None else seconds_of(self.keep_alive)

    def keep(self, model: LoadedModel) -> None:
        """Set the seconds for which the model is kept. Raises Problem."""
        if (seconds := self.kept()) is not None:
            model.keep(seconds)


class WritingRequest(LoadingRequest):
    """Fields of /api/chat and /api/generate."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "images": ([],),
    }
    stream: Boolean = True
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

    def variables(self) -> Object:
        """Return the variables of the chat template."""
        if self.think is None:
            return {}
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return dict.fromkeys(SWITCHES, self.think)

    def wanted(self) -> Wanted:
        """Return the wishes of the client, except for the prompt."""
        schema = {"type": "object"} if self.format == "json" else self.format
        constraint: TextConstraint | None = constraint_of("json", schema or None, "format")
        # -2 fills the context in ollama, as -1 does here.
        most = max(-1, self.options.max_tokens)
        return Wanted(self.options.model_copy(update={"max_tokens": most}), constraint)


class OllamaMessage(Reasoned):
    role: Role
    content: String = ""
    images: Several[String] = []  # noqa: RUF012
    tool_name: String | None = None
    tool_calls: Several[EarlierCall] | None = None

    def message(self) -> Message:
        """Return the message as `text.messages` reads it."""
        message: Message = self.model_dump(exclude_none=True)
        if self.images:
            text = {"type": "text", "text": self.content}
            message["content"] = [text, *({"type": "image"} for _ in self.images)]
        return {**message, **({} if self.tool_name is None else {"name": self.tool_name})}


class OllamaChatRequest(WritingRequest):
    """The body of /api/chat."""

    messages: Annotated[Several[OllamaMessage], Field(max_length=MESSAGES)] = []  # noqa: RUF012
    tools: ToolList = []  # noqa: RUF012


class OllamaGenerateRequest(WritingRequest):
    """The body of /api/generate."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **WritingRequest.refused,
        "context": ([],),
        "template": ("",),
    }
    prompt: String = ""
    suffix: String = ""
    system: String = ""
    raw: Boolean = False


class EmbedRequest(LoadingRequest):
    """The body of /api/embed."""

    input: String | Several[String] = []  # noqa: RUF012
    truncate: Boolean = True
    dimensions: Count | None = None


class OlderEmbedRequest(LoadingRequest):
    """The body of /api/embeddings."""

    prompt: String = ""


class ShowRequest(Body):
    """The body of /api/show. Older clients send `name` in place of `model`."""

    model: String | None = Field(None, validation_alias=AliasChoices("model", "name"))


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


# Answers.
def _durations(model: LoadedModel, began: float, **seconds: float) -> dict[str, int]:
    """Return the durations of a request in nanoseconds. began: The time at which the model was
    loaded. seconds: Further durations."""
    load_seconds = model.load_seconds
    total_seconds = load_seconds + time.perf_counter() - began
    seconds = {"total_duration": total_seconds, "load_duration": load_seconds, **seconds}
    return {name: int(1e9 * value) for name, value in seconds.items()}


def _time(when: datetime | None = None) -> str:
    return (when or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


class OllamaWriter(Writer):
    """The common base of chats and generated texts, which have one choice. nothing: The content of
    an answer without text."""

    nothing: ClassVar[Payload] = {}
    media = NDJSON
    heartbeat = b""  # a line that is no JSON object would be an error

    def __init__(
        self, model: LoadedModel, body: WritingRequest, prepared: Prepared, began: float
    ) -> None:
        super().__init__(model.name, prepared, stream=body.stream)
        body.keep(model)
        self._loaded, self._began = model, began
        # The call whose arguments come next.
        self._call = Call(0, "", "")

    def encoded(self, payload: Payload) -> bytes:
        return json.dumps(payload).encode() + b"\n"

    def failed(self, problem: Problem) -> list[Payload]:
        return [error(problem)[1]]

    def answer(self, choices: Sequence[Choice]) -> Payload:
        [choice] = choices
        texts = {"content": "", "reasoning": ""}
        for event in choice.events:
            if isinstance(event, Text):
                texts[event.kind] += event.text
        calls = [call for event in choice.events for call in self._called(event)]
        return self._last(choice, self.content(texts["content"], texts["reasoning"], calls))

    def event(self, event: Event) -> list[Payload]:
        lines = [self.content("", "", [call]) for call in self._called(event)]
        if isinstance(event, Text):
            texts = (event.text, "") if event.kind == "content" else ("", event.text)
            lines.append(self.content(*texts, []))
        return [{**self._head(), **line, "done": False} for line in lines]

    def end(self, choice: Choice) -> list[Payload]:
        return [self._last(choice, self.nothing)]

    def content(self, text: str, thought: str, calls: list[Payload]) -> Payload:
        """Return the fields of an answer that contain a piece of the text, or the complete text."""
        raise NotImplementedError

    def _called(self, event: Event) -> list[Payload]:
        """Return the call that an event completes, as a list of at most one entry."""
        if isinstance(event, Call):
            self._call = event
        if not isinstance(event, Arguments):
            return []
        call, arguments = self._call, json.loads(event.text)
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return [{"id": call.id, "function": function}]

    def _head(self) -> Payload:
        return {"model": self.model, "created_at": _time()}

    def _last(self, choice: Choice, content: Payload) -> Payload:
        seconds = None if choice.result is None else choice.result.stats.seconds
        durations = _durations(
            self._loaded,
            self._began,
            prompt_eval_duration=0.0 if seconds is None else seconds.prompt,
            eval_duration=0.0 if seconds is None else seconds.decoding,
        )
        return {
            **self._head(),
            **content,
            "done": True,
            "done_reason": "stop" if choice.finish_reason in ("eos", "stop") else "length",
            "prompt_eval_count": self.prepared.prompt_tokens,
            "eval_count": choice.tokens,
            **durations,
        }


class OllamaChatWriter(OllamaWriter):
    """/api/chat."""

    nothing: ClassVar[Payload] = {"message": {"role": "assistant", "content": ""}}

    def content(self, text: str, thought: str, calls: list[Payload]) -> Payload:
        message: Payload = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        return {"message": {**message, "tool_calls": calls} if calls else message}


class OllamaTextWriter(OllamaWriter):
    """/api/generate."""

    nothing: ClassVar[Payload] = {"response": ""}

    def content(self, text: str, thought: str, calls: list[Payload]) -> Payload:
        return {"response": text, **({"thinking": thought} if thought else {})}


def written_chat(model: LoadedModel, body: OllamaChatRequest) -> OllamaWriter:
    """Prepare the next message of a chat. Raises Problem and SpecdecError."""
    began = time.perf_counter()
    messages = [message.message() for message in body.messages]
    tools = Tools.of([tool.function for tool in body.tools], ToolChoice())
    prepared = model.chat(Chat(messages, tools, body.variables()), body.wanted())
    return OllamaChatWriter(model, body, prepared, began)


def written_text(model: LoadedModel, body: OllamaGenerateRequest) -> OllamaWriter:
    """Prepare an answer to a prompt, or the continuation of a text. Raises Problem and
    SpecdecError."""
    began, prompt, system = time.perf_counter(), body.prompt, body.system
    if model.way == "template" and not (body.raw or body.suffix):
        before = [{"role": "system", "content": system}] if system else []
        messages = [*before, {"role": "user", "content": prompt}]
        prepared = model.chat(Chat(messages, variables=body.variables()), body.wanted())
    else:
        text = prompt if body.raw or not system else f"{system}\n\n{prompt}"
        prepared = model.texts([text], body.wanted(), suffix=body.suffix)
    return OllamaTextWriter(model, body, prepared, began)


def error(problem: Problem) -> tuple[int, Payload]:
    """Return the status and the payload of an error."""
    return problem.status, {"error": problem.message}


# Routes.
async def _empty(http: Request, body: WritingRequest, writer: type[OllamaWriter]) -> Response:
    """Load or unload the model of a request without a prompt. Raises Problem."""
    ended = {"created_at": _time(), **writer.nothing, "done": True}
    registry, kept = service_of(http).registry, body.kept()
    if kept is not None and kept <= 0:
        model = registry.find(body.model)
        registry.unload(model)
        return JSONResponse({"model": model.name, **ended, "done_reason": "unload"})

    def load(model: LoadedModel, body: WritingRequest) -> Payload:
        body.keep(model)
        return {"model": model.name, **ended, "done_reason": "load"}

    return await compute(http, body, load)


@router.post("/chat", summary="Answers messages of ollama's clients")
async def chat(body: OllamaChatRequest, http: Request) -> Response:
    """Answer the messages of a conversation."""
    if not body.messages:
        return await _empty(http, body, OllamaChatWriter)
    return await complete(http, body, written_chat)


@router.post("/generate", summary="Answers a prompt of ollama's clients")
async def generate(body: OllamaGenerateRequest, http: Request) -> Response:
    """Answer a prompt, or continue a text."""
    if not (body.prompt or body.suffix):
        return await _empty(http, body, OllamaTextWriter)
    return await complete(http, body, written_text)


@router.post("/embed", summary="Embeds texts")
async def embed(body: EmbedRequest, http: Request) -> Response:
    """Embed texts. A request without one only loads the model."""
    inputs = [body.input] if isinstance(body.input, str) and body.input else body.input or []

    def write(vectors: list[list[float]], figures: Payload) -> Payload:
        return {"embeddings": vectors, **figures}

    return await _embed(http, body, "input", inputs, write, body.dimensions, body.truncate)


@router.post("/embeddings", summary="Embeds a text, for older clients")
async def older_embed(body: OlderEmbedRequest, http: Request) -> Response:
    """Embed a text."""

    def write(vectors: list[list[float]], figures: Payload) -> Payload:
        return {"embedding": vectors[0] if vectors else []}

    return await _embed(http, body, "prompt", [body.prompt] if body.prompt else [], write)


async def _embed(
    http: Request,
    body: LoadingRequest,
    field: str,
    inputs: Sequence[str],
    write: Callable[[list[list[float]], Payload], Payload],
    dimensions: int | None = None,
    shortens: bool = True,
) -> Response:
    """Embed texts. A blank text is not embedded. Its embedding is 0, so that it does not refuse the
    others.

    Args:
        field: The field of the body with the texts.
        write: Returns the answer with the vectors and the figures.
        dimensions, shortens: See `task_of`.
    """

    def make(model: LoadedModel, body: LoadingRequest) -> EngineTask:
        began = time.perf_counter()
        body.keep(model)
        texts = [text.strip() and text for text in inputs]

        def answer(count: int, vectors: Sequence[Vector]) -> Payload:
            rest, zeros = iter(vectors), [0.0] * model.pair.target.width
            found = [next(rest).tolist() if text else zeros for text in texts]
            figures = {"model": model.name, "prompt_eval_count": count}
            return write(found, {**figures, **_durations(model, began)})

        whole = [text for text in texts if text]
        return task_of(model, whole, field, answer, dimensions=dimensions, shortens=shortens)

    return await run(http, body, make)


def _described(service: Service, model: ServedModel) -> Payload:
    family = "" if model.facts is None else model.facts.family
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(datetime.fromtimestamp(service.created, UTC)),
        "size": model.nbytes,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "mlx",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": "",
            "quantization_level": "" if model.facts is None else model.facts.dtype,
        },
    }


@router.get("/tags", summary="Lists all models")
async def tags(http: Request) -> Payload:
    """List all models."""
    service = service_of(http)
    service.registry.refresh()
    return {"models": [_described(service, model) for model in service.registry.models]}


@router.get("/ps", summary="Lists the models in memory")
async def running(http: Request) -> Payload:
    """List the models that are in memory."""
    service = service_of(http)
    registry, now = service.registry, datetime.now(UTC)
    registry.refresh()
    models = []
    for model in registry.models:
        if model.state != "loaded" or model.facts is None:
            continue
        left = model.keep - (0.0 if model.busy else registry.clock() - model.used)
        kept = FOREVER if left > LONGEST_KEPT else now + timedelta(seconds=max(0.0, left))
        figures = {"size_vram": model.nbytes, "context_length": model.facts.longest}
        models.append({**_described(service, model), **figures, "expires_at": _time(kept)})
    return {"models": models}


@router.post("/show", summary="Describes a model")
async def show(body: ShowRequest, http: Request) -> Payload:
    """Describe a model. Its abilities are known from the first time it is loaded."""
    service = service_of(http)
    model = service.registry.find(body.model)
    service.registry.refresh()
    described, facts = _described(service, model), model.facts
    about: Payload = {"general.basename": model.name}
    if facts is not None:
        about |= {"general.architecture": facts.family}
        about[f"{facts.family}.context_length"] = facts.longest
    return {
        **dict.fromkeys(("license", "modelfile", "parameters", "template"), ""),
        "modified_at": described["modified_at"],
        "details": described["details"],
        "model_info": about,
        "capabilities": ["completion"] if facts is None else facts.capabilities,
    }


@router.get("/version", summary="The version of ollama's API")
async def version() -> Payload:
    """Return the version of the API."""
    return {"version": VERSION}


@router.post("/pull", summary="Not supported")
@router.post("/push", summary="Not supported")
@router.post("/create", summary="Not supported")
@router.post("/copy", summary="Not supported")
@router.post("/blobs/{digest}", summary="Not supported")
@router.delete("/delete", summary="Not supported")
async def refuse(http: Request) -> Payload:
    """Refuse to change the models of this server. Raises Problem."""
    names = service_of(http).registry.names
    raise invalid(
        f"{http.url.path} is not supported, because this server does not change its models: ask "
        f"for {names:.1000}, or start it with another --model NAME, which is downloaded if "
        "necessary"
    )
