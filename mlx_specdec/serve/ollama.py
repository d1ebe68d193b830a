"""ollama's API, for clients that know no other. Streams are lines of JSON, and requests wait while
their model is loaded."""

import functools
import hashlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from starlette.requests import Request

from ..engine.chat import chat_format
from ..engine.embeddings import Vector
from .answer_models import Anything
from .answers import Choice, Payload, Writer
from .bodies import Body, Fields
from .embeddings import task_of
from .events import Arguments, Call, Event, Text
from .models import ChatRequest, TextRequest
from .ollama_bodies import (
    EmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
    seconds_of,
)
from .problems import Problem, invalid
from .registry import ServedModel
from .requests import OPTION_FIELDS, ParsedRequest, RequestParser
from .service import Endpoint, Service
from .tasks import EngineTask

NDJSON = "application/x-ndjson"
VERSION = "0.12.6"
"""The version of ollama whose API this is. Some clients refuse old ones."""
OPTIONS = ("top_k", "seed", "stop", "repeat_last_n", *OPTION_FIELDS)
"""Options that a chat completion of OpenAI's API has as well."""
FOREVER = datetime.max.replace(tzinfo=UTC, microsecond=0)
"""The time of expiry that is reported for a model that stays until another needs its memory."""
LONGEST_KEPT = 1e9
"""If a model is kept for more seconds than these, FOREVER is reported."""


def _kept(parser: RequestParser, body: Body) -> None:
    if "keep_alive" in body:
        parser.keep(seconds_of(body["keep_alive"]))


def _durations(parser: RequestParser, began: float, **seconds: float) -> dict[str, int]:
    """Return the durations of a request in nanoseconds. began: The time at which the model was
    loaded. seconds: Further durations."""
    load_seconds = parser.load_seconds
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

    def __init__(self, parser: RequestParser, body: Body) -> None:
        self._began = time.perf_counter()
        # The call whose arguments come next.
        self._call = Call(0, "", "")
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
        return {"model": self.parser.name, "created_at": _time()}

    def _last(self, choice: Choice, content: Payload) -> Payload:
        seconds = None if choice.result is None else choice.result.stats.seconds
        durations = _durations(
            self.parser,
            self._began,
            prompt_eval_duration=0.0 if seconds is None else seconds.prompt,
            eval_duration=0.0 if seconds is None else seconds.decoding,
        )
        return {
            **self._head(),
            **content,
            "done": True,
            "done_reason": "stop" if choice.finish_reason in ("eos", "stop") else "length",
            "prompt_eval_count": self.request.prompt_tokens,
            "eval_count": choice.tokens,
            **durations,
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
    content: Any = message.get("content", "")
    if images := message.get("images"):
        content = [{"type": "text", "text": content}, *({"type": "image"} for _ in images)]
    return {**message, "content": content, "name": message.get("tool_name")}


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


def embed(parser: RequestParser, body: Body, field: str) -> Payload | EngineTask:
    """Answer /api/embed, or the older /api/embeddings. field: The field with the texts. A request
    without one only loads the model, which has happened before this call."""
    began = time.perf_counter()
    _kept(parser, body)
    given = body.get(field) or []
    inputs = [text.strip() and text for text in ([given] if isinstance(given, str) else given)]
    zeros = [0.0] * parser.pair.target.width

    def answer(prompt_tokens: int, vectors: Sequence[Vector]) -> Payload:
        # A blank text is not embedded. Its embedding is 0, so that it does not refuse the others.
        rest = iter(vectors)
        embeddings = [next(rest).tolist() if text else zeros for text in inputs]
        if field == "prompt":
            return {"embedding": embeddings[0] if embeddings else []}
        counted = {"embeddings": embeddings, "prompt_eval_count": prompt_tokens}
        return {"model": parser.name, **counted, **_durations(parser, began)}

    if not any(inputs):
        return answer(0, ())
    body = {**body, field: [text for text in inputs if text]}
    return task_of(parser, body, field, answer, shortens=body.get("truncate", True))


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
        kept = FOREVER if left > LONGEST_KEPT else now + timedelta(seconds=max(0.0, left))
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


def refuse(service: Service, request: Request) -> Payload:
    """Refuse to change the models of this server. Raises Problem."""
    raise invalid(
        f"{request.url.path} is not supported, because this server does not change its models: ask "
        f"for {service.registry.names:.1000}, or start it with another --model NAME, which is "
        "downloaded if necessary"
    )


def _endpoint(path: str, handler: Any, summary: str, body: type[Fields], **more: Any) -> Endpoint:
    error = OllamaWriter.error
    return Endpoint(path, handler, Anything, summary, body, error=error, waits=True, **more)


ENDPOINTS = (
    *(
        _endpoint(
            path,
            functools.partial(_generate, writer=writer),
            "Answers ollama's clients",
            body,
            streams=NDJSON,
            early=functools.partial(_unload, writer=writer),
        )
        for path, writer, body in (
            ("/api/chat", OllamaChatWriter, OllamaChatRequest),
            ("/api/generate", OllamaTextWriter, OllamaGenerateRequest),
        )
    ),
    *(
        _endpoint(path, functools.partial(embed, field=field), "Embeds texts", EmbedRequest)
        for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt"))
    ),
    _endpoint("/api/show", None, "About a model", ShowRequest, early=show),
    Endpoint("/api/tags", tags, Anything, "All models, for ollama's clients"),
    Endpoint("/api/ps", running, Anything, "The models in memory"),
    Endpoint("/api/version", version, Anything, "The version of ollama's API"),
    *(
        Endpoint(path, refuse, Anything, "Not supported", verb=verb, error=OllamaWriter.error)
        for path, verb in (
            *((f"/api/{name}", "POST") for name in ("pull", "push", "create", "copy")),
            ("/api/delete", "DELETE"),
            ("/api/blobs/{digest}", "POST"),
        )
    ),
)
