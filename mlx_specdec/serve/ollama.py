"""ollama's API, for clients that know no other. Streams are lines of JSON, and requests wait while
their model is loaded."""

import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictInt
from starlette.requests import Request

from ..engine.chat import chat_format
from .answer_models import Anything
from .answers import Choice, Payload, Writer
from .bodies import Body, Boolean, Fields, Number, Object, String, integral, worded
from .events import Arguments, Call, Event, Text, joined
from .models import (
    ChatRequest,
    Count,
    EarlierCall,
    Penalty,
    Repetition,
    Role,
    Sampled,
    Stop,
    Stops,
    TextRequest,
    ToolList,
)
from .problems import Problem, invalid
from .registry import ServedModel
from .requests import SAME, ParsedRequest, RequestParser
from .service import Endpoint, Service

LINES = "application/x-ndjson"
VERSION = "0.12.6"
"""The version of ollama whose API this is. Some clients refuse old ones."""
OPTIONS = ("top_k", "seed", "stop", *SAME)
"""Options that a chat completion of OpenAI's API has as well."""
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
DURATION = re.compile(rf"[+-]?(?:{PART.pattern})+")
FOREVER = datetime.max.replace(tzinfo=UTC, microsecond=0)
"""The time of expiry that is reported for a model that stays until another needs its memory."""
LONGEST = 1e9
"""If a model is kept for more seconds than these, FOREVER is reported."""


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
    min_p: Annotated[Number, Field(ge=0, lt=1)] | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | Stops | None = None


class LoadingRequest(Fields):
    """Fields of /api/chat and /api/generate."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "images": ([],),
    }
    model: String | None = None
    stream: Boolean | None = None
    options: GenerationOptions | None = None
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
    keep_alive: Annotated[Number | String, worded('seconds, or a text such as "5m"')] | None = None


class OllamaMessage(Fields):
    refused: ClassVar[Mapping[str, Sequence[object]]] = {"images": ([],)}
    role: Role
    content: String | None = None
    thinking: String | None = None
    tool_name: String | None = None
    tool_calls: list[EarlierCall] | None = None


class OllamaChatRequest(LoadingRequest):
    """The body of /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: ToolList | None = None


class OllamaGenerateRequest(LoadingRequest):
    """The body of /api/generate."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **LoadingRequest.refused,
        "context": ([],),
        "template": ("",),
    }
    prompt: String | None = None
    suffix: String | None = None
    system: String | None = None
    raw: Boolean | None = None


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


def _kept(parser: RequestParser, body: Body) -> None:
    if "keep_alive" in body:
        parser.keep(seconds_of(body["keep_alive"]))


def _time(when: datetime | None = None) -> str:
    return (when or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


class OllamaWriter(Writer):
    """The common base of chats and generated texts, which have one choice. nothing: The content of
    an answer without text."""

    nothing: ClassVar[Payload] = {}
    media = LINES
    heartbeat = b""  # a line that is no JSON object would be an error

    def __init__(self, parser: RequestParser, body: Body) -> None:
        self._began = time.perf_counter()
        # The call whose arguments are not complete, with their pieces.
        self._call: Call | None = None
        self._pieces: list[str] = []
        super().__init__(parser, body)
        self.stream = body.get("stream", True)
        _kept(parser, body)

    def encoded(self, payload: Payload) -> bytes:
        return json.dumps(payload).encode() + b"\n"

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        return problem.status, {"error": problem.message}

    def answer(self, choices: Sequence[Choice]) -> Payload:
        [choice] = choices
        texts = {"content": "", "reasoning": ""}
        for event in choice.events:
            if isinstance(event, Text):
                texts[event.kind] += event.text
        calls = [one for event in joined(choice.events) for one in self._after(event)]
        whole = self.content(texts["content"], texts["reasoning"], [*calls, *self._after(None)])
        return self._last(choice, whole)

    def event(self, event: Event) -> list[Payload]:
        lines = [self.content("", "", [call]) for call in self._after(event)]
        if isinstance(event, Text):
            texts = (event.text, "") if event.kind == "content" else ("", event.text)
            lines.append(self.content(*texts, []))
        return [{**self._head(), **line, "done": False} for line in lines]

    def end(self, choice: Choice) -> list[Payload]:
        calls = self._after(None)
        lines = [{**self._head(), **self.content("", "", [one]), "done": False} for one in calls]
        return [*lines, self._last(choice, self.nothing)]

    def content(self, text: str, thought: str, calls: list[Payload]) -> Payload:
        """Return the fields of an answer that contain a piece of the text, or the complete text."""
        message: Payload = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def options(self, body: Body) -> dict[str, Any]:
        """Return the fields of a completion of OpenAI's API, except for its prompt."""
        options = body.get("options", {})
        fields = {name: options[name] for name in OPTIONS if name in options}
        fields["max_tokens"] = max(-1, options.get("num_predict", -1))
        wanted = body.get("format")
        if wanted == "json":
            fields["response_format"] = {"type": "json_object"}
        elif wanted:
            fields["response_format"] = {"type": "json_schema", "schema": wanted}
        return fields

    def chat(self, body: Body, messages: list[dict[str, Any]]) -> ParsedRequest:
        """Return the request for the next message of a chat."""
        think = body.get("think")
        fields = {**self.options(body), "messages": messages, "tools": body.get("tools")}
        if isinstance(think, str):
            fields["reasoning_effort"] = think
        elif think is not None:
            fields["enable_thinking"] = think
        return self.parser.chat(ChatRequest.read(fields))

    def _after(self, event: Event | None) -> list[Payload]:
        """Read an event, and return the call that it completes as a list of at most one entry. None
        stands for the end of the answer."""
        if isinstance(event, Arguments):
            self._pieces.append(event.text)
            return []
        ended, pieces = self._call, self._pieces
        self._call, self._pieces = (event if isinstance(event, Call) else None), []
        if ended is None:
            return []
        try:
            arguments = json.loads("".join(pieces) or "{}")
        except ValueError:
            return []  # the completion was cut
        function = {"index": ended.index, "name": ended.name, "arguments": arguments}
        return [{"id": ended.id, "function": function}]

    def _head(self) -> Payload:
        return {"model": self.parser.name, "created_at": _time()}

    def _last(self, choice: Choice, content: Payload) -> Payload:
        seconds = None if choice.result is None else choice.result.stats.seconds
        durations = {
            "total_duration": self.parser.load_seconds + time.perf_counter() - self._began,
            "load_duration": self.parser.load_seconds,
            "prompt_eval_duration": 0.0 if seconds is None else seconds.prompt,
            "eval_duration": 0.0 if seconds is None else seconds.decoding,
        }
        return {
            **self._head(),
            **content,
            "done": True,
            "done_reason": "stop" if choice.finish_reason in ("eos", "stop") else "length",
            "prompt_eval_count": self.request.prompt_tokens,
            "eval_count": choice.tokens,
            **{name: int(1e9 * value) for name, value in durations.items()},
        }


class OllamaChatWriter(OllamaWriter):
    """/api/chat."""

    nothing: ClassVar[Payload] = {"message": {"role": "assistant", "content": ""}}

    def parse(self, body: Body) -> ParsedRequest:
        return self.chat(body, [_message(message) for message in body["messages"]])


class OllamaTextWriter(OllamaWriter):
    """/api/generate."""

    nothing: ClassVar[Payload] = {"response": ""}

    def parse(self, body: Body) -> ParsedRequest:
        prompt, system, suffix = body.get("prompt", ""), body.get("system", ""), body.get("suffix")
        way = chat_format(self.parser.pair, self.parser.options).way
        if way == "template" and not (body.get("raw") or suffix):
            before = [{"role": "system", "content": system}] if system else []
            return self.chat(body, [*before, {"role": "user", "content": prompt}])
        text = prompt if body.get("raw") or not system else f"{system}\n\n{prompt}"
        fields = {**self.options(body), "prompt": text, "suffix": suffix}
        return self.parser.completions(TextRequest.read(fields))

    def content(self, text: str, thought: str, calls: list[Payload]) -> Payload:
        return {"response": text, **({"thinking": thought} if thought else {})}


def _message(message: Body) -> dict[str, Any]:
    renamed = {"reasoning_content": message.get("thinking"), "name": message.get("tool_name")}
    kept = {name: message[name] for name in ("role", "tool_calls") if name in message}
    return {**kept, "content": message.get("content", ""), **renamed}


def _empty(body: Body) -> bool:
    """Return whether a request only loads or unloads its model."""
    return not (body.get("messages") or body.get("prompt") or body.get("suffix"))


def _without_text(writer: type[OllamaWriter], name: str, reason: str) -> Payload:
    ended = {"done": True, "done_reason": reason}
    return {"model": name, "created_at": _time(), **writer.nothing, **ended}


def _unload(
    service: Service, model: ServedModel, body: Body, writer: type[OllamaWriter]
) -> Payload | None:
    """Unload a model if a request without a prompt sets `keep_alive` to 0, and return the answer.
    Return None for other requests."""
    if not _empty(body) or "keep_alive" not in body or seconds_of(body["keep_alive"]) > 0:
        return None
    service.registry.unload(model)
    return _without_text(writer, model.name, "unload")


def _generate(parser: RequestParser, body: Body, writer: type[OllamaWriter]) -> Payload | Writer:
    """Answer /api/chat or /api/generate. A request without a prompt only loads the model, which has
    happened before this call."""
    if _empty(body):
        _kept(parser, body)
        return _without_text(writer, parser.name, "load")
    return writer(parser, body)


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


def tags(service: Service, request: Request) -> Payload:
    """List all models."""
    service.registry.refresh()
    return {"models": [_described(service, model) for model in service.registry.models]}


def running(service: Service, request: Request) -> Payload:
    """List the models that are in memory."""
    registry, now = service.registry, datetime.now(UTC)
    registry.refresh()
    models = []
    for model in registry.models:
        if model.state != "loaded" or model.facts is None:
            continue
        left = model.keep - (0.0 if model.busy else registry.clock() - model.idle_since)
        kept = FOREVER if left > LONGEST else now + timedelta(seconds=max(0.0, left))
        figures = {"size_vram": model.nbytes, "context_length": model.facts.longest}
        models.append({**_described(service, model), **figures, "expires_at": _time(kept)})
    return {"models": models}


def show(service: Service, model: ServedModel, body: Body) -> Payload:
    """Describe a model. Its abilities are known from the first time it is loaded."""
    if "name" in body and "model" not in body:
        model = service.registry.find(body["name"])
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


def version(service: Service, request: Request) -> Payload:
    """Return the version of the API."""
    return {"version": VERSION}


ERROR = OllamaWriter.error
ENDPOINTS = (
    *(
        Endpoint(
            path,
            functools.partial(_generate, writer=writer),
            Anything,
            "Answers ollama's clients",
            body,
            error=ERROR,
            streams=LINES,
            waits=True,
            early=functools.partial(_unload, writer=writer),
        )
        for path, writer, body in (
            ("/api/chat", OllamaChatWriter, OllamaChatRequest),
            ("/api/generate", OllamaTextWriter, OllamaGenerateRequest),
        )
    ),
    # `show` answers every request early, so that the handler `tags` is never called.
    Endpoint("/api/show", tags, Anything, "About a model", ShowRequest, error=ERROR, early=show),
    Endpoint("/api/tags", tags, Anything, "All models, for ollama's clients"),
    Endpoint("/api/ps", running, Anything, "The models in memory"),
    Endpoint("/api/version", version, Anything, "The version of ollama's API"),
)
