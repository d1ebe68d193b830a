"""Anthropic's Messages API."""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field

from ..results import Step
from ..text.messages import Message, text_of
from .events import Event, joined
from .fields import Body, Boolean, Fields, Kinds, Object, Several, parts_of
from .internal import Chat, Limit, Sampled, ToolChoice, Tools, Wanted
from .problems import Problem
from .requests import CompletionBody, LoadedModel, Prepared
from .service import Choice, Payload, Writer, post, streamed
from .shared_bodies import Content, ContentPart, Formatted, Function, Parameters, Role, Thoughtful

ANTHROPIC_ERRORS = {404: "not_found_error", 413: "request_too_large"}
ANTHROPIC_ERRORS |= {500: "api_error", 503: "overloaded_error"}
"""Anthropic's names of errors, by status, if they differ from OpenAI's names."""
STOP_REASONS = {"eos": "end_turn", "stop": "stop_sequence"}
"""Anthropic's names of finish reasons. All other reasons are "max_tokens"."""
BLOCKS: Mapping[str, Payload] = {
    "content": {"type": "text", "text": "", "citations": None},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""The empty block of each kind. Deltas are named after the block's type."""
UNUSED_COUNTS: Payload = dict.fromkeys(
    ("cache_creation", "inference_geo", "server_tool_use", "service_tier")
)
"""Fields of a usage that Anthropic's schema requires, and that have no meaning here."""
router = APIRouter()


# Bodies.
class ContentBlock(ContentPart):
    """A part of a message, of a system prompt, or of a result of a tool."""

    kinds: ClassVar[Kinds] = {**ContentPart.kinds, "tool_use": ("name",), "tool_result": ()}
    content: Content = ""
    id: str | None = None
    name: str = ""
    input: Object | None = None
    tool_use_id: str | None = None


class BlocksMessage(Fields):
    role: Role
    content: str | Several[ContentBlock]

    def messages(self) -> list[Message]:
        """Return the messages for `text.messages`. Every result of a tool becomes a message of its
        own, before the message with the other blocks."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        parts: list[Message] = []
        calls: list[Message] = []
        results: list[Message] = []
        for block in self.content:
            if block.type == "tool_use":
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "function": function})
            elif block.type == "tool_result":
                id = {} if block.tool_use_id is None else {"tool_call_id": block.tool_use_id}
                results.append({"role": "tool", "content": parts_of(block.content), **id})
            else:
                parts.append(block.model_dump(exclude_none=True))
        if results and not (parts or calls):
            return results
        called = {"tool_calls": calls} if calls else {}
        return [*results, {"role": self.role, "content": parts or "", **called}]


class MessagesTool(Function, extra="ignore"):
    """A tool. The tools of other types run on Anthropic's servers, such as web_search_20250305."""

    kinds: ClassVar[Kinds] = {"custom": ("name",)}
    type: Annotated[str, Field(pattern="^custom$|_[0-9]{8}$")] = "custom"  # type: ignore[assignment]
    parameters: Parameters | None = Field(None, validation_alias="input_schema")


class MessagesChoice(Fields):
    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: Boolean = False


class CountRequest(Body, Thoughtful):
    """The body of /v1/messages/count_tokens."""

    system: Content | None = None
    messages: Annotated[Several[BlocksMessage], Field(min_length=1)]
    tools: Several[MessagesTool] = []  # noqa: RUF012
    tool_choice: MessagesChoice = MessagesChoice()

    def chat(self) -> Chat:
        """Return the conversation. A last message of the assistant is the beginning of the answer.
        Raises Problem."""
        messages = [part for message in self.messages for part in message.messages()]
        if self.system is not None:
            messages = [{"role": "system", "content": parts_of(self.system)}, *messages]
        last, choice = messages[-1], self.tool_choice
        said = last["role"] == "assistant" and text_of(last["content"])
        listed = [tool.tool for tool in self.tools if tool.type == "custom"]
        kind, name = choice.type, choice.name if choice.type == "tool" else ""
        # "any" and "tool" demand a call.
        wanted = ToolChoice(kind if kind == "none" or kind == "auto" else "required", name)
        tools = Tools.of(listed, wanted, not choice.disable_parallel_tool_use)
        begun = said and not last.get("tool_calls")
        return self.chat_of(messages, tools, "continue" if begun else "answer")


class MessagesRequest(CompletionBody, CountRequest, Sampled):
    """The body of /v1/messages."""

    max_tokens: Limit
    stop: Several[str] = Field([], validation_alias="stop_sequences")
    output_config: Formatted = Formatted()

    def prepared(self, model: LoadedModel) -> Prepared:
        constraints = self.output_config.format.constraints("output_config")
        return model.chat(self.chat(), Wanted(self, constraints))


# Answers.
class MessagesWriter(Writer):
    """The wire format of messages, which have one choice."""

    _block = -1
    # The kind of the block that has not ended.
    _open = ""

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        kind = ANTHROPIC_ERRORS.get(problem.status, problem.type)
        error = {"type": kind, "message": problem.message}
        return problem.status, {"type": "error", "error": error}

    def silence(self) -> bytes:
        return self.encoded({"type": "ping"})

    def answer(self, choices: Sequence[Choice]) -> Payload:
        [choice] = choices
        events = [*joined(choice.events)] or [Event("content", "")]
        return {**self._message([*map(_block, events)], choice), **_end(choice)}

    def start(self, choice: Choice) -> Iterator[Payload]:
        yield {"type": "message_start", "message": self._message([], choice)}

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> Iterator[Payload]:
        for event in events:
            if event.kind != self._open or event.kind == "call":
                yield from self._begin(event)
            type, name = "input_json_delta", "partial_json"
            if event.kind != "call":
                name = BLOCKS[event.kind]["type"]
                type = f"{name}_delta"
            delta = {"type": type, name: event.text}
            yield {"type": "content_block_delta", "index": self._block, "delta": delta}

    def end(self, choice: Choice) -> Iterator[Payload]:
        if self._block < 0:
            yield from self._begin(Event("content", ""))
        yield from self._close()
        yield {"type": "message_delta", "delta": _end(choice), "usage": self._usage(choice)}
        yield self.last(choice, ())

    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        return {"type": "message_stop"}

    def _begin(self, event: Event) -> Iterator[Payload]:
        yield from self._close()
        self._block, self._open = self._block + 1, event.kind
        block = _block(replace(event, text=""))
        yield {"type": "content_block_start", "index": self._block, "content_block": block}

    def _close(self) -> Iterator[Payload]:
        if self._open:
            yield {"type": "content_block_stop", "index": self._block}
        self._open = ""

    def _message(self, content: list[Payload], choice: Choice) -> Payload:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": self._usage(choice),
        }

    def _usage(self, choice: Choice) -> Payload:
        """Return the numbers of tokens. Unlike OpenAI, Anthropic does not count cached input."""
        cached = self.cached_tokens([choice])
        return {
            "input_tokens": self.prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": choice.tokens,
            "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens},
            **UNUSED_COUNTS,
        }


def _block(event: Event) -> Payload:
    """Return the block of a text or a call."""
    if event.kind != "call":
        block = BLOCKS[event.kind]
        return {**block, block["type"]: event.text}
    return {
        "type": "tool_use",
        "id": event.id,
        "name": event.name,
        "input": json.loads(event.text or "{}"),
        "caller": {"type": "direct"},
    }


def _end(choice: Choice) -> Payload:
    reason = STOP_REASONS.get(choice.finish_reason or "length", "max_tokens")
    if reason == "end_turn" and choice.reader.count:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": choice.stop or None}


def count(model: LoadedModel, body: CountRequest) -> Payload:
    """Count the tokens of a prompt. Raises Problem."""
    return {"input_tokens": len(model.chat_ids(body.chat()))}


# Routes.
post(
    router,
    "/messages",
    MessagesRequest,
    MessagesWriter,
    "Answers Anthropic's clients",
    streamed(MessagesWriter),
)
post(router, "/messages/count_tokens", CountRequest, count, "Counts the prompt's tokens")
