"""What Anthropic's clients ask for: /v1/messages, as a chat completion would say it."""

from __future__ import annotations

import functools
import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..decoding.stop_criteria import Emission
from ..text.markers import NONE
from .body import Body
from .chat import text_of
from .figures import Choice, cached_tokens
from .problems import CONTEXT, Problem
from .reading import Arguments, Call, Event, Reader, Text, calls_of
from .requests import Asked, Asking
from .wire import Told

SAME = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "speculative")
"""Fields that are fields of a chat completion."""
BILLING = re.compile(r"x-anthropic-billing-header:(?: *[a-z_]+=[^;\s]*;)+\s*")
"""Claude Code's attribution, as it begins the first block of its system prompt:
`x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;`
(musistudio/claude-code-router issue 1220, vllm-project/vllm pull request 36829). `cch` changes from
request to request, so that the prompt cache finds nothing behind it. Where no line break follows,
the next text may stand directly behind the last semicolon."""
CHOICES: Mapping[object, str] = {"auto": "auto", "any": "required", "none": "none"}
log = logging.getLogger(__name__)
TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def ask(asking: Asking, body: Body) -> Asked:
    """What a body for /v1/messages asks for. Raises Problem."""
    body = asking.read("MessagesRequest", body)
    own = {name: body[name] for name in SAME if name in body}
    return asking.chat({**own, **_format(body), **_as_chat(asking, body)})


def count(asking: Asking, body: Body) -> int:
    """Tokens of a body for /v1/messages/count_tokens. Raises Problem."""
    chat = _as_chat(asking, asking.read("CountRequest", body))
    return len(asking.prompt(asking.read("ChatRequest", chat)))


def _as_chat(asking: Asking, body: Body) -> Body:
    """What belongs to the prompt, as fields of a chat completion. Raises Problem."""
    messages = _messages(body)
    if "system" in body:
        system = _system(body["system"], keep_billing=asking.keep_billing)
        messages = [{"role": "system", "content": system}, *messages]
    last = messages[-1]
    told = {"messages": messages, **_tools(body), "thinking": body.get("thinking")}
    # A last message of the assistant is the beginning of the answer.
    begun = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    return {**told, "continue_final_message": bool(begun)}


def error(problem: Problem) -> dict[str, Any]:
    """A problem as Anthropic's clients read it."""
    told = problem.as_dict()["error"]
    kind = TYPES.get(problem.status, told["type"])
    too_long = problem.code == CONTEXT and problem.param in ("messages", "prompt")
    # Anthropic's API begins this error with these words, which clients may look for.
    message = f"prompt is too long: {problem.message}" if too_long else problem.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def _format(body: Body) -> dict[str, Any]:
    """The schema of an answer: of output_config, or as it was called before. Efforts are hints."""
    given = body.get("output_config", {}).get("format") or body.get("output_format")
    return {} if given is None else {"response_format": given}


def _tools(body: Body) -> dict[str, Any]:
    told: dict[str, Any] = {
        "tools": [_tool(each) for each in body.get("tools", ()) if _is_own(each)]
    }
    choice = body.get("tool_choice", {})
    if not choice:
        return told
    if choice.get("disable_parallel_tool_use"):
        told["parallel_tool_calls"] = False
    if choice["type"] == "tool":
        function = {"name": choice.get("name")}
        return {**told, "tool_choice": {"type": "function", "function": function}}
    return {**told, "tool_choice": CHOICES[choice["type"]]}


def _is_own(tool: Body) -> bool:
    """Return False for the tools that Anthropic's servers run themselves."""
    own = tool.get("type", "custom") == "custom"
    if not own:
        log.info("the tool %.80s is left out: this server has none of its own", tool["type"])
    return own


def _tool(given: Body) -> Body:
    function = {
        "name": given["name"],
        "description": given.get("description"),
        "parameters": given.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _system(given: str | Sequence[Mapping[str, Any]], *, keep_billing: bool) -> str:
    """Return the system prompt without the billing line of Claude Code."""
    texts = [given] if isinstance(given, str) else [each["text"] for each in given]
    if not keep_billing and (match := BILLING.match(texts[0] if texts else "")):
        texts[0] = texts[0][match.end() :]
        _log_once()
    return "".join(texts)


@functools.cache
def _log_once() -> None:
    log.info(
        "left the line x-anthropic-billing-header out of system prompts, which would defeat the "
        "prompt cache: --keep-billing-lines keeps it"
    )


def _messages(body: Body) -> list[dict[str, Any]]:
    """Return the messages of a body without the system prompt."""
    return [one for each in body["messages"] for one in _message(each)]


def _message(given: Body) -> list[dict[str, Any]]:
    """A message, with one before it for each result of a tool."""
    blocks = given["content"]
    if isinstance(blocks, str):
        return [dict(given)]
    results = [_result(each) for each in blocks if each["type"] == "tool_result"]
    thoughts = [each.get("thinking", "") for each in blocks if each["type"] == "thinking"]
    calls = [_call(each) for each in blocks if each["type"] == "tool_use"]
    rest = [each for each in blocks if each["type"] == "text"]
    message = {**given, "content": rest or ""}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if rest or thoughts or calls or not results else results


def _result(block: Body) -> dict[str, Any]:
    content = text_of(block.get("content", ""))
    return {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}


def _call(block: Body) -> dict[str, Any]:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


REASONS = {"eos": "end_turn", "stop": "stop_sequence"}


class MessagesWire:
    """As wire.Wire, for a single choice. model: its name."""

    done = b""
    named = True

    def __init__(self, model: str, asked: Asked) -> None:
        self._model = model
        self._input = asked.prompt_tokens
        self._reader = Reader(NONE) if asked.reader is None else asked.reader()
        self._block = -1
        self._open: object = None

    def answer(self, choices: Sequence[Choice], prompt_tokens: int) -> Told:
        """The whole answer at once."""
        [choice] = choices
        events = self._reader.push("".join(choice.texts)) + self._reader.finish()
        told = {**self._message(_content(events), choice.tokens), **self._end(choice)}
        return {**told, "usage": self._usage(choice)}

    def slow(self, index: int) -> bool:
        """Whether a call is being read."""
        return self._reader.inside

    def first(self, index: int) -> list[Told]:
        """What comes before the first text."""
        return [{"type": "message_start", "message": self._message([], 0)}]

    def piece(self, index: int, choice: Choice, emission: Emission) -> list[Told]:
        """Events of what a step gave, if there is some."""
        return self._events(self._reader.push(emission.text))

    def end(self, index: int, choice: Choice) -> list[Told]:
        """What comes after the last text, and what was held back before it."""
        told = self._events(self._reader.finish())
        if self._block < 0:
            told += self._begin(dict(EMPTY), "content")
        return [
            *told,
            *self._close(),
            {"type": "message_delta", "delta": self._end(choice), "usage": self._usage(choice)},
            {"type": "message_stop"},
        ]

    def rest(self, choices: Sequence[Choice], asked: Asked) -> list[Told]:
        """Nothing comes after the end."""
        return []

    def error(self, problem: Problem) -> Told:
        """What ends a stream early."""
        return error(problem)

    def _events(self, events: Sequence[Event]) -> list[Told]:
        return [told for event in events for told in self._event(event)]

    def _event(self, event: Event) -> list[Told]:
        """What is read, in a block of its own kind."""
        if isinstance(event, Call):
            return self._begin(_tool_use(event, {}), event.index)
        if isinstance(event, Arguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        block, delta = BLOCKS[event.kind]
        begun = [] if self._open == event.kind else self._begin(dict(block), event.kind)
        kind, name = delta
        return [*begun, self._delta({"type": kind, name: event.text})]

    def _begin(self, block: Told, kind: object) -> list[Told]:
        closed = self._close()
        self._block, self._open = self._block + 1, kind
        begun = {"type": "content_block_start", "index": self._block, "content_block": block}
        return [*closed, begun]

    def _close(self) -> list[Told]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._block}]

    def _delta(self, delta: Told) -> Told:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _message(self, content: list[Told], tokens: int) -> Told:
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

    def _usage(self, choice: Choice) -> Told:
        """Tokens as Anthropic counts them: what was not read again is no input."""
        return self._counts(cached_tokens([choice], self._input), choice.tokens)

    def _counts(self, cached: int, tokens: int) -> Told:
        return {
            "input_tokens": self._input - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
            **UNUSED,
        }

    def _end(self, choice: Choice) -> Told:
        reason = choice.result.finish_reason if choice.result is not None else "length"
        told = REASONS.get(reason, "max_tokens")
        if told == "end_turn" and self._reader.called:
            told = "tool_use"
        return {"stop_reason": told, "stop_sequence": choice.stop or None}


UNUSED: Told = dict.fromkeys(
    ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
)
"""Fields of a usage that Anthropic's schema requires and that mean nothing here."""
EMPTY: Told = {"type": "text", "text": "", "citations": None}
BLOCKS = {
    "content": (EMPTY, ("text_delta", "text")),
    "reasoning": (
        {"type": "thinking", "thinking": "", "signature": ""},
        ("thinking_delta", "thinking"),
    ),
}
"""How a block of each kind begins, and what its deltas are called."""


def _content(events: Sequence[Event]) -> list[Told]:
    """Blocks of all that was read, in its order, which is that of a stream."""
    blocks: list[Told] = []
    arguments = {call.index: text for call, text in calls_of(events)}
    for event in events:
        if isinstance(event, Call):
            blocks.append(_tool_use(event, _object(arguments[event.index])))
        elif isinstance(event, Text):
            block, (_, name) = BLOCKS[event.kind]
            if not blocks or blocks[-1]["type"] != block["type"]:
                blocks.append(dict(block))
            blocks[-1][name] += event.text
    return blocks or [dict(EMPTY)]


def _tool_use(call: Call, given: object) -> Told:
    told = {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
    return {**told, "caller": {"type": "direct"}}


def _object(arguments: str) -> object:
    """Arguments as an object; those that were cut are none yet."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
