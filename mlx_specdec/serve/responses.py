"""OpenAI's Responses API, whose input and output are items. For the fields that clients need, see
openai-python (types/responses), openresponses/openresponses and openai/codex (codex-rs, for example
protocol/src/models.rs)."""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from ..results import Step
from ..text.messages import Message, Tool, lines_of, log_once, shown_name, text_of
from .events import Event
from .fields import Body, Boolean, Kinds, Object, Refused, Several, Typed, either, parts_of
from .internal import Chat, Limit, Sampled, Wanted
from .problems import Problem
from .requests import CompletionBody, LoadedModel, Prepared
from .service import Choice, Payload, Writer, post, registry_of, streamed
from .shared_bodies import Constrained, Content, ContentPart, Formatted, Function, ToolChoosing
from .stored import StoredConversation

router = APIRouter()
ENCRYPTED = "mlx-specdec reasoning: "
"""The beginning of the `encrypted_content` that this server writes for reasoning. The text of the
reasoning follows."""
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool in the prompt. Custom tools have a text as input."""
SKIPPED = "skipped %s of the type %r, which this server does not know"
PARAMS = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Names of fields of a Responses request, by the names of the same fields of a chat."""
ID_PREFIX = "resp_"
"""The beginning of ids. It distinguishes ids from other paths below /v1/responses."""
ECHOED: Payload = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "user")),
    **dict.fromkeys(("previous_response_id", "prompt_cache_key", "safety_identifier")),
    "background": False,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Fields that a response copies from the request, with their defaults."""
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
LOGPROBS: Mapping[str, Payload] = {"message": {"logprobs": []}}
"""Further fields of the events with a text, by the type of the item."""
MORE: Mapping[str, Payload] = {"message": {"annotations": [], "logprobs": []}}
"""Further fields of a part, by the type of the item."""


# Bodies.
class Item(Typed):
    """An item of a conversation. Items of unknown types are skipped, because clients often add new
    types."""

    kinds: ClassVar[Kinds] = {
        "message": ("role", "content"),
        "reasoning": (),
        "function_call": ("call_id", "name", "arguments"),
        "custom_tool_call": ("call_id", "name", "input"),
        **dict.fromkeys(("function_call_output", "custom_tool_call_output"), ("call_id", "output")),
    }
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Content = ""
    summary: Several[ContentPart] = []  # noqa: RUF012
    encrypted_content: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: Content = ""


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Return the messages of a chat. Consecutive items of the assistant become one message, so that
    the results of calls follow the message with the calls."""
    messages: list[Message] = []
    for item in items:
        role, content = item.role, text_of(parts_of(item.content))
        if item.type not in Item.kinds:
            log_once(SKIPPED, "an input item", item.type)
        elif item.type.endswith("_output"):
            output = text_of(parts_of(item.output))
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "message" and role != "assistant":
            messages.append({"role": role, "content": content})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _add(item, content, messages[-1])
    return messages


def _add(item: Item, content: str, turn: Message) -> None:
    """Add an item of the assistant to a message."""
    if item.type == "message":
        turn["content"] = lines_of([turn["content"], content])
    elif item.type == "reasoning":
        if item.encrypted_content.startswith(ENCRYPTED):
            content = item.encrypted_content.removeprefix(ENCRYPTED)
        content = content or text_of(parts_of(item.summary))
        turn["reasoning_content"] = lines_of([turn.get("reasoning_content", ""), content])
    else:
        custom = item.type == "custom_tool_call"
        name, arguments = shown_name(item.name, item.namespace), item.arguments
        function = {"name": name, "arguments": {"input": item.input} if custom else arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


class ResponsesTool(Function):
    """A tool, or a namespace of tools. Tools of unknown types are skipped."""

    kinds: ClassVar[Kinds] = {
        **dict.fromkeys(("function", "custom"), ("name",)),
        "namespace": ("name", "tools"),
    }
    type: str  # type: ignore[assignment]
    format: Object = {}  # noqa: RUF012
    tools: Several["ResponsesTool"] = []  # noqa: RUF012
    namespace: str | None = None

    def called(self, namespace: str | None = None) -> list["ResponsesTool"]:
        """Return the tools that the model can call: this tool, or the tools of this namespace."""
        if self.type == "namespace":
            return [called for tool in self.tools for called in tool.called(self.name)]
        if self.type not in self.kinds:
            log_once(SKIPPED, "a tool", self.type)
            return []
        return [self.model_copy(update={"namespace": namespace})]

    @property
    def tool(self) -> Tool:
        """The tool in the format of chat templates. The grammar of a custom tool's input is shown,
        but not enforced."""
        function = self.model_dump(include={"description", "parameters"}, exclude_none=True)
        if self.type == "custom":
            function["parameters"] = CUSTOM
            if definition := self.format.get("definition"):
                grammar = f"The input follows this grammar:\n{definition}"
                function["description"] = f"{self.description or ''}\n\n{grammar}".strip()
        name = shown_name(self.name, self.namespace)
        return {"type": "function", "function": {"name": name, **function}}


class InputTokensRequest(Body, ToolChoosing):
    """The body of /v1/responses/input_tokens."""

    refused: ClassVar[Refused] = {"conversation": (), "prompt": ()}
    input: str | Annotated[Several[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Several[ResponsesTool] = []  # noqa: RUF012

    def items(self) -> Sequence[Item]:
        """Return the input as items."""
        if not isinstance(self.input, str):
            return self.input
        return [Item(role="user", content=self.input)]

    def before(self, model: LoadedModel) -> StoredConversation:
        """Return the conversation that the request continues. Raises Problem."""
        id = self.previous_response_id
        return StoredConversation() if id is None else model.responses.get(model.tenant, id)

    def called(self) -> list[ResponsesTool]:
        """Return the tools that the model can call, including tools in namespaces."""
        return [called for tool in self.tools for called in tool.called()]

    def chat(self, model: LoadedModel) -> Chat:
        """Return the conversation, with the one that the request continues. Raises Problem."""
        messages = messages_of([*self.before(model).items, *self.items()])
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        messages = messages or [{"role": "user", "content": ""}]
        return self.chat_of(messages, self.chosen(self.called()))


class ResponsesRequest(CompletionBody, InputTokensRequest, Constrained, Sampled, extra="allow"):
    """The body of /v1/responses. Codex treats a cut answer as a failure, so the default for
    max_tokens is no limit. The response repeats further fields, such as `metadata`."""

    refused: ClassVar[Refused] = {
        **Sampled.refused,
        **InputTokensRequest.refused,
        "top_logprobs": (0,),
    }
    max_tokens: Limit = either(-1, "max_output_tokens", "max_tokens")
    text: Formatted = Formatted()
    include: Several[str] = []  # noqa: RUF012
    store: Boolean = True

    def prepared(self, model: LoadedModel) -> Prepared:
        constraints = [*self.text.format.constraints("text"), *self.constraints()]
        return model.chat(self.chat(model), Wanted(self, constraints))


# Answers.
class ResponsesWriter(Writer):
    """Writes a response, which has one choice, and stores it if the client wishes."""

    body: ResponsesRequest

    def __init__(self, model: LoadedModel, body: ResponsesRequest) -> None:
        super().__init__(model, body)
        self._stored, self._tenant, self._before = model.responses, model.tenant, body.before(model)
        self._encrypts = "reasoning.encrypted_content" in body.include
        self._tools = {shown_name(tool.name, tool.namespace): tool for tool in body.called()}
        self._events = 0
        self._output: list[Payload] = []
        # The type of the last item, or "" if it has ended, and the pieces of its text.
        self._kind = ""
        self._pieces: list[str] = []
        options = self.prepared.requests[0].options
        sent = body.model_dump(by_alias=True, exclude_unset=True)
        sent["max_output_tokens"] = sent.get("max_tokens")
        self._head: Payload = {
            "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            **{name: sent.get(name, default) for name, default in ECHOED.items()},
            "tools": [{**OPTIONAL.get(tool["type"], {}), **tool} for tool in sent.get("tools", ())],
            "text": {"format": {"type": "text"}, **sent.get("text", {})},
            **{name: getattr(options, name) for name in SAMPLED},
        }

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        status, payload = Writer.error(problem)
        payload["error"]["param"] = PARAMS.get(problem.param or "", problem.param)
        # Codex repeats a request after 503, but never after 429.
        return 503 if status == 429 else status, payload

    def failed(self, problem: Problem) -> Iterator[Payload]:
        error = {"code": problem.code or "server_error", "message": problem.message}
        yield self._state("failed", error=error)

    def silence(self) -> bytes:
        # Codex waits 300 s for an event and does not count comments.
        return self.encoded(self._state("in_progress"))

    def answer(self, choices: Sequence[Choice]) -> Payload:
        [choice] = choices
        *_, last = *self.piece(choice, Step(), choice.events), *self.end(choice)
        return {**last["response"], **self.timings(choices)}

    def start(self, choice: Choice) -> Iterator[Payload]:
        yield {**self._state("in_progress"), "type": "response.created"}
        yield self._state("in_progress")

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> Iterator[Payload]:
        for event in events:
            text = event.text
            if event.kind == "call":
                unknown = ResponsesTool.model_construct(type="function", name=event.name)
                tool = self._tools.get(event.name, unknown)
                called = {"call_id": event.id, "name": tool.name}
                if tool.namespace is not None:
                    called["namespace"] = tool.namespace
                custom = tool.type == "custom"
                values = json.loads(text) if custom else {}
                # A custom tool has one argument, "input". Other arguments stay as they are.
                if isinstance(values.get("input"), str) and len(values) == 1:
                    text = values["input"]
                yield from self._begin("custom_tool_call" if custom else "function_call", **called)
            elif self._kind != ITEM_TYPES[event.kind]:
                yield from self._begin(ITEM_TYPES[event.kind])
            self._pieces.append(text)
            name, more = ITEM_FORMS[self._kind][1], LOGPROBS.get(self._kind, {})
            yield self._of_item(f"response.{name}.delta", delta=text, **more)

    def end(self, choice: Choice) -> Iterator[Payload]:
        if not self._output:
            yield from self._begin("message")
        yield from self._close("completed" if choice.complete else "incomplete")
        yield self.last(choice, ())

    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        tokens = self.prepared.prompt_tokens
        usage = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens([choice])},
            "output_tokens": choice.tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": tokens + choice.tokens,
        }
        more: Payload = {"incomplete_details": {"reason": "max_output_tokens"}}
        more = {"completed_at": int(time.time())} if choice.complete else more
        last = self._state(self._output[-1]["status"], usage=usage, **more)
        if self.body.store:
            response = last["response"]
            output = [Item.model_validate(item) for item in response["output"]]
            items = [*self._before.items, *self.body.items(), *output]
            nbytes = self._before.nbytes + len(self.body.model_dump_json(include={"input"}))
            nbytes += len(json.dumps([response, response["output"]]))
            self._stored.put(self._tenant, StoredConversation(response, items, nbytes))
        return {**last, **self.timings([choice])}

    def _begin(self, kind: str, **called: object) -> Iterator[Payload]:
        yield from self._close("completed")
        prefix, _, _, empty = ITEM_FORMS[kind]
        id = f"{prefix}_{uuid.uuid4().hex}"
        item = {"id": id, "type": kind, "status": "in_progress", **called, **empty}
        self._output.append(item)
        self._kind, self._pieces = kind, []
        at = len(self._output) - 1
        yield self._event("response.output_item.added", item=dict(item), output_index=at)
        if kind == "message":
            part = {"type": "output_text", "text": "", **MORE[kind]}
            yield self._of_item("response.content_part.added", part=part)

    def _close(self, status: str) -> Iterator[Payload]:
        """End the last item, unless that has ended. status: how."""
        if not self._kind:
            return
        kind, text, item = self._kind, "".join(self._pieces), self._output[-1]
        _, name, field, empty = ITEM_FORMS[kind]
        part = {"type": name, "text": text, **MORE.get(kind, {})}
        item |= {**({"content": [part]} if "content" in empty else {field: text}), "status": status}
        if kind == "reasoning" and self._encrypts:
            item["encrypted_content"] = ENCRYPTED + text
        more = {"name": item["name"]} if kind == "function_call" else LOGPROBS.get(kind, {})
        yield self._of_item(f"response.{name}.done", **{field: text}, **more)
        if kind == "message":
            yield self._of_item("response.content_part.done", part=part)
        self._kind = ""
        at = len(self._output) - 1
        yield self._event("response.output_item.done", item=item, output_index=at)

    def _of_item(self, kind: str, **fields: object) -> Payload:
        """Return an event about the last item."""
        content = {"content_index": 0} if self._kind in ("message", "reasoning") else {}
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **place, **content, **fields)

    def _event(self, kind: str, **fields: object) -> Payload:
        number, self._events = self._events, self._events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _state(self, status: str, **more: object) -> Payload:
        """Return an event with the response."""
        ended = dict.fromkeys(("completed_at", "incomplete_details", "error", "usage"))
        output = [] if status == "in_progress" else self._output
        response = {**self._head, **ended, "status": status, "output": output, **more}
        return self._event(f"response.{status}", response=response)


def count(model: LoadedModel, body: InputTokensRequest) -> Payload:
    """Count the tokens of a prompt. Raises Problem."""
    tokens = len(model.chat_ids(body.chat(model)))
    return {"object": "response.input_tokens", "input_tokens": tokens}


# Routes.
post(
    router,
    "/responses",
    ResponsesRequest,
    ResponsesWriter,
    "Answers items",
    streamed(ResponsesWriter),
)
post(router, "/responses/input_tokens", InputTokensRequest, count, "Counts the tokens")
STORED = f"/responses/{ID_PREFIX}{{id}}"


@router.get(STORED, summary="A stored response")
async def stored(id: str, http: Request) -> Payload:
    return registry_of(http).responses.get(http.scope["tenant"], ID_PREFIX + id).response


@router.delete(STORED, summary="Deletes a stored response")
async def delete(id: str, http: Request) -> Payload:
    id = ID_PREFIX + id
    registry_of(http).responses.get(http.scope["tenant"], id, delete=True)
    return {"id": id, "object": "response.deleted", "deleted": True}
