"""OpenAI's Responses API, whose input and output are items. For the fields that clients need, see
openresponses/openresponses and openai/codex (codex-rs/codex-api/src/sse/responses.rs)."""

import functools
import json
import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request

from ..results import Step
from .answer_models import Anything, CountAnswer, ResponseAnswer
from .answers import Choice, Payload, Writer
from .bodies import Body
from .events import Arguments, Call, Event, joined
from .items import (
    ENCRYPTED,
    RESPONSES_FIELDS,
    InputTokensRequest,
    ResponsesRequest,
    ToolName,
    as_chat,
    items_of,
    named_tools,
)
from .models import ChatRequest
from .openai import timings
from .problems import Problem
from .requests import ParsedRequest, RequestParser
from .service import Endpoint, Service
from .stored import Conversation

PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
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


def count_tokens(parser: RequestParser, body: Body) -> Payload:
    """Count the tokens of a checked body for /v1/responses/input_tokens. Raises Problem."""
    chat = as_chat(body, [*_before(parser, body).items, *items_of(body)])
    ids = parser.chat_ids(ChatRequest.read(chat))
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _before(parser: RequestParser, body: Body) -> Conversation:
    """Return the conversation that a request continues. Raises Problem if it is not stored."""
    id = body.get("previous_response_id")
    return Conversation() if id is None else parser.responses.get(id, parser.tenant)


def stored(service: Service, request: Request, *, delete: bool = False) -> Payload:
    """Return a stored response, or delete it. Raises Problem."""
    id = f"{ID_PREFIX}{request.path_params['response_id']}"
    found = service.responses.get(id, request.scope.get("tenant", ""), delete=delete)
    return {"id": id, "object": "response.deleted", "deleted": True} if delete else found.response


class ResponsesWriter(Writer):
    """Writes a response, which has one choice."""

    named = True

    def __init__(self, parser: RequestParser, body: Body) -> None:
        super().__init__(parser, body)
        options = self.request.requests[0].options
        self._names = {tool.shown: tool for tool in named_tools(body)}
        self._events = 0
        self._output: list[Payload] = []
        # The type of the last item and the pieces of its text, or None if the item has ended.
        self._kind = ""
        self._pieces: list[str] | None = None
        text = body.get("text", {})
        self._head: Payload = {
            "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": parser.name,
            **ECHOED,
            **{name: body[name] for name in ECHOED if name in body},
            **FIXED_FIELDS,
            "tools": [{**OPTIONAL.get(tool["type"], {}), **tool} for tool in body.get("tools", ())],
            "text": {**text, "format": text.get("format") or {"type": "text"}},
            **{name: getattr(options, name) for name in SAMPLED},
        }

    def parse(self, body: Body) -> ParsedRequest:
        self._before = _before(self.parser, body)
        chat = {name: body[name] for name in RESPONSES_FIELDS if name in body}
        chat |= as_chat(body, [*self._before.items, *items_of(body)])
        # Codex treats a cut answer as a failure, so the default for max_tokens is no limit.
        chat["max_tokens"] = body.get("max_output_tokens", -1)
        chat["response_format"] = body.get("text", {}).get("format")
        return self.parser.chat(ChatRequest.read(chat))

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        payload = problem.as_dict()
        error = payload["error"]
        error["param"] = PARAMS.get(error["param"], error["param"])
        # Codex repeats a request after 503, but never after 429.
        return 503 if problem.status == 429 else problem.status, payload

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
        tokens = self.request.prompt_tokens
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
        if self.body.get("store", True):
            items, parser = items_of(self.body), self.parser
            parser.responses.put(response, self._before, items, parser.tenant)
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
            if INCLUDE_REASONING in self.body.get("include", ()):
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


ERROR = ResponsesWriter.error
PATH, STORED = "/v1/responses", f"/v1/responses/{ID_PREFIX}{{response_id}}"
TOKENS_PATH = f"{PATH}/input_tokens"
delete = functools.partial(stored, delete=True)
ENDPOINTS = (
    Endpoint(PATH, ResponsesWriter, ResponseAnswer, "Answers items", ResponsesRequest, error=ERROR),
    Endpoint(TOKENS_PATH, count_tokens, CountAnswer, "Counts", InputTokensRequest, error=ERROR),
    Endpoint(STORED, stored, ResponseAnswer, "A stored response"),
    Endpoint(STORED, delete, Anything, "Deletes it", verb="DELETE"),
)
