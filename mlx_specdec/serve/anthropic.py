"""Anthropic's Messages API: read as a chat of OpenAI's, answered with blocks of content."""

from __future__ import annotations

import functools
import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..decoding.stop_criteria import Emission
from .answers import Choice, ParsedRequest, Payload, Writer, cached_tokens
from .body import Body
from .chat import text_of
from .events import Arguments, Call, Event, calls_of
from .problems import CONTEXT, Problem
from .requests import RequestParser
from .service import Service, post

SAME = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "speculative")
"""Fields that a chat completion has as well."""
BILLING = re.compile(r"x-anthropic-billing-header:(?: *[a-z_]+=[^;\s]*;)+\s*")
"""Claude Code's attribution, as it begins the first block of its system prompt:
`x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;`
(musistudio/claude-code-router issue 1220, vllm-project/vllm pull request 36829). `cch` changes with
every request, so that the prompt cache finds nothing after it. Where no line break follows, the
next text may begin right after the last semicolon."""
TOOL_CHOICES: Mapping[object, str] = {"auto": "auto", "any": "required", "none": "none"}
ERRORS = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
"""Names of errors that differ from OpenAI's, by their status."""
REASONS = {"eos": "end_turn", "stop": "stop_sequence"}
"""Anthropic's names of the reasons why a text ends; all others are "max_tokens"."""
EMPTY: Payload = {"type": "text", "text": "", "citations": None}
BLOCKS = {
    "content": (EMPTY, ("text_delta", "text")),
    "reasoning": (
        {"type": "thinking", "thinking": "", "signature": ""},
        ("thinking_delta", "thinking"),
    ),
}
"""How a block of each kind begins, the type of its deltas and their field."""
UNUSED: Payload = dict.fromkeys(
    ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
)
"""Fields of a usage that Anthropic's schema requires and that mean nothing here."""
log = logging.getLogger(__name__)


def parse_messages(parser: RequestParser, body: Body) -> tuple[ParsedRequest, MessagesWriter]:
    """Read a body for /v1/messages. Raises Problem."""
    body = parser.check("MessagesRequest", body)
    chat = {name: body[name] for name in SAME if name in body} | _as_chat(parser, body)
    # `effort`, which output_config has as well, is a hint.
    given = body.get("output_config", {}).get("format") or body.get("output_format")
    if given is not None:
        chat["response_format"] = given
    parsed = parser.chat(chat)
    return parsed, MessagesWriter(parser.name, parsed)


def count_tokens(parser: RequestParser, body: Body) -> int:
    """Return the number of tokens of a body for /v1/messages/count_tokens. Raises Problem."""
    chat = _as_chat(parser, parser.check("CountRequest", body))
    return len(parser.chat_ids(parser.check("ChatRequest", chat)))


def _as_chat(parser: RequestParser, body: Body) -> dict[str, Any]:
    """Return what makes the prompt, as fields of a chat completion."""
    messages = [one for each in body["messages"] for one in _messages_of(each)]
    if "system" in body:
        system = _system(body["system"], keep_billing=parser.settings.keep_billing)
        messages = [{"role": "system", "content": system}, *messages]
    last = messages[-1]
    # A last message of the assistant is the beginning of the answer.
    begun = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    return {
        "messages": messages,
        "tools": [_tool(each) for each in body.get("tools", ()) if _is_custom(each)],
        **_tool_choice(body.get("tool_choice", {})),
        "thinking": body.get("thinking"),
        "continue_final_message": bool(begun),
    }


def _tool_choice(choice: Body) -> Body:
    if not choice:
        return {}
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if choice["type"] == "tool":
        function = {"name": choice.get("name")}
        return {**parallel, "tool_choice": {"type": "function", "function": function}}
    return {**parallel, "tool_choice": TOOL_CHOICES[choice["type"]]}


def _is_custom(tool: Body) -> bool:
    """Return False for the tools that Anthropic's servers run themselves."""
    custom = tool.get("type", "custom") == "custom"
    if not custom:
        log.info("the tool %.80s is left out: this server has none of its own", tool["type"])
    return custom


def _tool(tool: Body) -> Body:
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _system(system: str | Sequence[Mapping[str, Any]], *, keep_billing: bool) -> str:
    """Return the system prompt without the billing line of Claude Code."""
    texts = [system] if isinstance(system, str) else [each["text"] for each in system]
    if not keep_billing and (match := BILLING.match(texts[0] if texts else "")):
        texts[0] = texts[0][match.end() :]
        _log_billing_once()
    return "".join(texts)


@functools.cache
def _log_billing_once() -> None:
    log.info(
        "left the line x-anthropic-billing-header out of system prompts, which would defeat the "
        "prompt cache: --keep-billing-lines keeps it"
    )


def _messages_of(message: Body) -> list[dict[str, Any]]:
    """Return a message in OpenAI's format, after a message for each result of a tool."""
    blocks = message["content"]
    if isinstance(blocks, str):
        return [dict(message)]
    of_type: dict[str, list[Body]] = {}
    for each in blocks:
        of_type.setdefault(each["type"], []).append(each)
    results = [
        {
            "role": "tool",
            "content": text_of(each.get("content", "")),
            "tool_call_id": each.get("tool_use_id"),
        }
        for each in of_type.get("tool_result", ())
    ]
    if results and not of_type.keys() & {"text", "thinking", "tool_use"}:
        return results
    rest = {**message, "content": of_type.get("text", "")}
    if thoughts := of_type.get("thinking"):
        rest["reasoning_content"] = "".join(each.get("thinking", "") for each in thoughts)
    if calls := of_type.get("tool_use"):
        rest["tool_calls"] = [_tool_call(each) for each in calls]
    return [*results, rest]


def _tool_call(block: Body) -> dict[str, Any]:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def error_payload(problem: Problem) -> Payload:
    """Return a problem in Anthropic's format."""
    too_long = problem.code == CONTEXT and problem.param in ("messages", "prompt")
    # Anthropic's API begins this error with these words, which clients may look for.
    message = f"prompt is too long: {problem.message}" if too_long else problem.message
    kind = ERRORS.get(problem.status, problem.type)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _error_response(problem: Problem) -> Response:
    return JSONResponse(error_payload(problem), problem.status, problem.headers)


class MessagesWriter(Writer):
    """Writes a message, which has one choice. model: its name."""

    named = True

    def __init__(self, model: str, request: ParsedRequest) -> None:
        self._model = model
        self._input_tokens = request.prompt_tokens
        self._block = -1
        self._open: object = None

    def answer(self, choices: Sequence[Choice]) -> Payload:
        [choice] = choices
        message = self._message(_content(choice.events), choice.tokens)
        return {**message, **_end(choice), "usage": self._usage(choice)}

    def start(self, index: int) -> list[Payload]:
        return [{"type": "message_start", "message": self._message([], 0)}]

    def piece(
        self, index: int, choice: Choice, emission: Emission, events: Sequence[Event]
    ) -> list[Payload]:
        """Return the deltas of what was generated, and the limits of blocks between them."""
        return [payload for event in events for payload in self._event(event)]

    def end(self, index: int, choice: Choice, events: Sequence[Event]) -> list[Payload]:
        payloads = [payload for event in events for payload in self._event(event)]
        if self._block < 0:
            payloads += self._begin(dict(EMPTY), "content")
        return [
            *payloads,
            *self._close(),
            {"type": "message_delta", "delta": _end(choice), "usage": self._usage(choice)},
            {"type": "message_stop"},
        ]

    def error(self, problem: Problem) -> Payload:
        return error_payload(problem)

    def _event(self, event: Event) -> list[Payload]:
        if isinstance(event, Call):
            return self._begin(_tool_use(event, {}), event.index)
        if isinstance(event, Arguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        block, (kind, name) = BLOCKS[event.kind]
        begun = [] if self._open == event.kind else self._begin(dict(block), event.kind)
        return [*begun, self._delta({"type": kind, name: event.text})]

    def _begin(self, block: Payload, kind: object) -> list[Payload]:
        closed = self._close()
        self._block, self._open = self._block + 1, kind
        begun = {"type": "content_block_start", "index": self._block, "content_block": block}
        return [*closed, begun]

    def _close(self) -> list[Payload]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._block}]

    def _delta(self, delta: Payload) -> Payload:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _message(self, content: list[Payload], tokens: int) -> Payload:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": self._counts(0, tokens),
        }

    def _usage(self, choice: Choice) -> Payload:
        return self._counts(cached_tokens([choice], self._input_tokens), choice.tokens)

    def _counts(self, cached: int, tokens: int) -> Payload:
        """Count tokens as Anthropic does: cached ones are not among the input tokens."""
        return {
            "input_tokens": self._input_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
            **UNUSED,
        }


def _end(choice: Choice) -> Payload:
    reason = REASONS.get(choice.finish_reason or "length", "max_tokens")
    if reason == "end_turn" and choice.reader.called:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": choice.stop or None}


def _content(events: Sequence[Event]) -> list[Payload]:
    """Return the blocks of a whole message, in the order in which a stream has them."""
    blocks: list[Payload] = []
    arguments = {call.index: text for call, text in calls_of(events)}
    for event in events:
        if isinstance(event, Call):
            blocks.append(_tool_use(event, _arguments(arguments[event.index])))
        elif not isinstance(event, Arguments):
            block, (_, name) = BLOCKS[event.kind]
            if not blocks or blocks[-1]["type"] != block["type"]:
                blocks.append(dict(block))
            blocks[-1][name] += event.text
    return blocks or [dict(EMPTY)]


def _tool_use(call: Call, given: object) -> Payload:
    block = {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
    return {**block, "caller": {"type": "direct"}}


def _arguments(text: str) -> object:
    """Return arguments as an object, an empty one where they were cut."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


async def messages(service: Service, request: Request) -> Response:
    """Answer messages."""
    return await service.answer(request, *await service.parse(request, parse_messages))


async def count(service: Service, request: Request) -> Response:
    """Count the tokens of messages."""
    return JSONResponse({"input_tokens": await service.parse(request, count_tokens)})


ENDPOINTS = tuple(
    replace(each, error=_error_response)
    for each in (
        post("/v1/messages", messages, "MessagesRequest", "Message", "Answers Anthropic's clients"),
        post("/v1/messages/count_tokens", count, "CountRequest", "Count", "Counts tokens"),
    )
)
