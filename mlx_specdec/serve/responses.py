"""OpenAI's Responses API, whose input and output are items. For the fields that clients need, see
openresponses/openresponses and openai/codex (codex-rs/codex-api/src/sse/responses.rs)."""

import json
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..results import Step
from .answers import Choice, Payload, Writer
from .events import Arguments, Call, Event, joined
from .items import ENCRYPTED, InputTokensRequest, ResponsesRequest, ToolName
from .openai import timings
from .problems import Problem
from .requests import LoadedModel, Prepared
from .service import complete, compute, service_of
from .stored import StoredConversation

router = APIRouter()
PARAMS = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Names of fields of a Responses request, by the names of the same fields of a chat."""
ID_PREFIX = "resp_"
"""The beginning of ids. It distinguishes ids from other paths below /v1/responses."""
INCLUDE_REASONING = "reasoning.encrypted_content"
ECHOED: Payload = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "user")),
    **dict.fromkeys(("previous_response_id", "prompt_cache_key", "safety_identifier")),
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""Fields that a response copies from the request, with their defaults."""
FIXED_FIELDS = {"background": False, "service_tier": "default", "top_logprobs": 0}
"""Fields with the same value in every response."""
SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
OPTIONAL: Payload = {"function": dict.fromkeys(("description", "parameters", "strict"))}
"""Fields of a tool, by the tool's type, that a response must have even if they are null."""
ITEM_TYPES = {"content": "message", "reasoning": "reasoning"}
"""Types of items by the kinds of texts."""
ITEM_FORMS: dict[str, tuple[str, str, str, Payload]] = {
    "message": ("msg", "output_text", "text", {"role": "assistant", "content": []}),
    "reasoning": ("rs", "reasoning_text", "text", {"summary": [], "content": []}),
    "function_call": ("fc", "function_call_arguments", "arguments", {"arguments": ""}),
    "custom_tool_call": ("ctc", "custom_tool_call_input", "input", {"input": ""}),
}
"""For each type of item: the beginning of ids, the name of the text in events, the field of the
complete text in the last event, and the fields of an item without text."""


# Answers.
class ResponsesWriter(Writer):
    """Writes a response, which has one choice.

    Args:
        finished: Called with the complete response.
    """

    named = True

    def __init__(
        self,
        model: LoadedModel,
        body: ResponsesRequest,
        prepared: Prepared,
        finished: Callable[[Payload], None],
    ) -> None:
        super().__init__(model.name, prepared, stream=body.stream)
        options = prepared.requests[0].options
        self._finished = finished
        self._encrypts = INCLUDE_REASONING in body.include
        self._names = {tool.shown: tool for tool in body.named_tools()}
        self._events = 0
        self._output: list[Payload] = []
        # The type of the last item and the pieces of its text, or None if the item has ended.
        self._kind = ""
        self._pieces: list[str] | None = None
        sent = body.model_dump(by_alias=True, exclude_unset=True)
        sent["max_output_tokens"] = sent.get("max_tokens")
        self._head: Payload = {
            "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            **{name: sent.get(name, default) for name, default in ECHOED.items()},
            **FIXED_FIELDS,
            "tools": [{**OPTIONAL.get(tool["type"], {}), **tool} for tool in sent.get("tools", ())],
            "text": {"format": {"type": "text"}, **sent.get("text", {})},
            **{name: getattr(options, name) for name in SAMPLED},
        }

    def failed(self, problem: Problem) -> list[Payload]:
        error = {"code": problem.code or "server_error", "message": problem.message}
        return [self._event("response.failed", response=self._response("failed", error=error))]

    def silence(self) -> list[Payload]:
        """Return an event, since Codex waits 300 s for one and does not count comments."""
        return [self._event("response.in_progress", response=self._response("in_progress"))]

    def answer(self, choices: Sequence[Choice]) -> Payload:
        [choice] = choices
        self.piece(choice, Step(), joined(choice.events))
        last = self.end(choice)[-1]
        return {**last["response"], **timings(choices)}

    def start(self, choice: Choice) -> list[Payload]:
        response = self._response("in_progress")
        return [self._event("response.created", response=response), *self.silence()]

    def end(self, choice: Choice) -> list[Payload]:
        cut = choice.finish_reason not in ("eos", "stop")
        status = "incomplete" if cut else "completed"
        empty = [] if self._output else self._begin("message")
        payloads = [*empty, *self._close(status)]
        tokens = self.prepared.prompt_tokens
        usage = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens([choice])},
            "output_tokens": choice.tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": tokens + choice.tokens,
        }
        why = {"incomplete_details": {"reason": "max_output_tokens"}}
        more: Payload = why if cut else {"completed_at": int(time.time())}
        response = self._response(status, usage=usage, **more)
        self._finished(response)
        last = self._event(f"response.{status}", response=response)
        return [*payloads, {**last, **timings([choice])}]

    def event(self, event: Event) -> list[Payload]:
        if isinstance(event, Call):
            tool = self._names.get(event.name, ToolName(event.name))
            called: Payload = {"call_id": event.id, "name": tool.name}
            if tool.namespace is not None:
                called["namespace"] = tool.namespace
            return self._begin("custom_tool_call" if tool.custom else "function_call", **called)
        kind = "" if isinstance(event, Arguments) else ITEM_TYPES[event.kind]
        begun = self._begin(kind) if kind and (self._pieces is None or self._kind != kind) else []
        assert self._pieces is not None, "arguments came before their call"
        self._pieces.append(event.text)
        if self._kind == "custom_tool_call":
            return begun  # the event at the end has the input without the JSON around it
        more: Payload = {"logprobs": []} if self._kind == "message" else {}
        name = f"response.{ITEM_FORMS[self._kind][1]}.delta"
        return [*begun, self._of_item(name, delta=event.text, **more)]

    def _begin(self, kind: str, **called: object) -> list[Payload]:
        closed = self._close("completed")
        prefix, _, _, empty = ITEM_FORMS[kind]
        id = f"{prefix}_{uuid.uuid4().hex}"
        item = {"id": id, "type": kind, "status": "in_progress", **called, **empty}
        self._output.append(item)
        self._kind, self._pieces = kind, []
        begun = [self._of_output("response.output_item.added", dict(item))]
        if kind == "message":
            begun.append(self._of_item("response.content_part.added", part=_output_text("")))
        return [*closed, *begun]

    def _close(self, status: str) -> list[Payload]:
        """End the last item, unless that has ended. status: how."""
        if self._pieces is None:
            return []
        kind, text = self._kind, "".join(self._pieces)
        _, name, field, _ = ITEM_FORMS[kind]
        ended: list[Payload] = []
        if kind == "custom_tool_call":
            text = custom_input(text)
            ended.append(self._of_item(f"response.{name}.delta", delta=text))
        part = _output_text(text)
        content: Payload = {field: text}
        more: Payload = {}
        if kind == "message":
            content, more = {"content": [part]}, {"logprobs": []}
        elif kind == "reasoning":
            content = {"content": [{"type": "reasoning_text", "text": text}]}
            if self._encrypts:
                content["encrypted_content"] = ENCRYPTED + text
        elif kind == "function_call":
            more = {"name": self._output[-1]["name"]}
        self._output[-1] = {**self._output[-1], **content, "status": status}
        ended.append(self._of_item(f"response.{name}.done", **{field: text}, **more))
        if kind == "message":
            ended.append(self._of_item("response.content_part.done", part=part))
        self._pieces = None
        return [*ended, self._of_output("response.output_item.done", self._output[-1])]

    def _of_output(self, kind: str, item: Payload) -> Payload:
        return self._event(kind, item=item, output_index=len(self._output) - 1)

    def _of_item(self, kind: str, **fields: object) -> Payload:
        """Return an event about the last item."""
        content = {"content_index": 0} if self._kind in ("message", "reasoning") else {}
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **place, **content, **fields)

    def _event(self, kind: str, **fields: object) -> Payload:
        number, self._events = self._events, self._events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _response(self, status: str, **more: object) -> Payload:
        ended = dict.fromkeys(("completed_at", "incomplete_details", "error", "usage"))
        output = [] if status == "in_progress" else self._output
        return {**self._head, **ended, "status": status, "output": output, **more}


def _output_text(text: str) -> Payload:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool, {"input": "..."}, or other arguments as
    they are."""
    values = json.loads(arguments)
    text = values.get("input")
    return text if isinstance(text, str) and len(values) == 1 else arguments


def error(problem: Problem) -> tuple[int, Payload]:
    """Return the status and the payload of an error."""
    payload = problem.as_dict()
    payload["error"]["param"] = PARAMS.get(problem.param or "", problem.param)
    # Codex repeats a request after 503, but never after 429.
    return 503 if problem.status == 429 else problem.status, payload


# Routes.
def _before(http: Request, body: InputTokensRequest) -> StoredConversation:
    """Return the conversation that a request continues. Raises Problem if it is not stored."""
    id, tenant = body.previous_response_id, http.scope["tenant"]
    stored = service_of(http).responses
    return StoredConversation() if id is None else stored.get(id, tenant)


@router.post("/responses", summary="Answers items")
async def responses(body: ResponsesRequest, http: Request) -> Response:
    """Answer the items of a conversation."""
    service, tenant = service_of(http), http.scope["tenant"]

    def make(model: LoadedModel, body: ResponsesRequest) -> ResponsesWriter:
        before = _before(http, body)

        def finished(response: Payload) -> None:
            if body.store:
                nbytes = len(body.model_dump_json(include={"input"}))
                service.responses.put(response, before, body.items(), nbytes, tenant)

        prepared = model.chat(body.chat(before.items), body.wanted())
        return ResponsesWriter(model, body, prepared, finished)

    return await complete(http, body, make)


@router.post("/responses/input_tokens", summary="Counts the tokens of items")
async def input_tokens(body: InputTokensRequest, http: Request) -> Response:
    """Count the tokens of a prompt."""

    def count(model: LoadedModel, body: InputTokensRequest) -> Payload:
        ids = model.chat_ids(body.chat(_before(http, body).items))
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    return await compute(http, body, count)


STORED = f"/responses/{ID_PREFIX}{{id}}"


@router.get(STORED, summary="A stored response")
async def stored(id: str, http: Request) -> Payload:
    """Return a stored response."""
    found = service_of(http).responses.get(ID_PREFIX + id, http.scope["tenant"])
    return found.response


@router.delete(STORED, summary="Deletes a stored response")
async def delete(id: str, http: Request) -> Payload:
    """Delete a stored response."""
    id = ID_PREFIX + id
    service_of(http).responses.get(id, http.scope["tenant"], delete=True)
    return {"id": id, "object": "response.deleted", "deleted": True}
