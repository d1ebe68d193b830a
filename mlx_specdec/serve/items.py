"""Bodies of OpenAI's Responses API, whose input items and tools become the messages and tools of a
chat. Field names as in openai-python (types/responses) and codex-rs (protocol/src/models.rs)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter

from ..text.messages import Message, log_once, text_of
from .fields import MESSAGES, Body, Boolean, ByType, Fields, Object, Several, String
from .internal import (
    LONGEST_TOOL_NAME,
    TOOLS,
    Chat,
    Function,
    MaxTokens,
    Name,
    Parameters,
    Sampled,
    ToolChoice,
    Tools,
    Wanted,
    choice_of,
)
from .problems import invalid
from .shared_bodies import (
    Content,
    ObjectFormat,
    OneOf,
    Part,
    SchemaFormat,
    StructuredOutputs,
    TextFormat,
    Thoughtful,
    parts_of,
)

ENCRYPTED = "mlx-specdec reasoning: "
"""The beginning of the `encrypted_content` that this server writes for reasoning. The text of the
reasoning follows."""
CUSTOM = Parameters.model_validate(
    {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
)
"""Parameters of a custom tool in the prompt. Custom tools have a text as input."""
SKIPPED = "skipped %s of the type %r, which this server does not know"


class Item(Protocol):
    """An item of a conversation."""

    def add(self, messages: list[Message]) -> None:
        """Add the item to the messages of a chat."""


def _turn(messages: list[Message]) -> Message:
    """Return the last message if it is the assistant's, or a new one. Consecutive items of the
    assistant become one message, so that the results of calls follow the message with the calls."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _write(messages: list[Message], field: str, text: str) -> None:
    turn = _turn(messages)
    turn[field] = "\n".join(filter(None, [turn.get(field), text]))


class MessageItem(Fields):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def add(self, messages: list[Message]) -> None:
        """Add the item to the messages of a chat."""
        text = text_of(parts_of(self.content))
        if self.role == "assistant":
            _write(messages, "content", text)
        else:
            messages.append({"role": self.role, "content": text})


class ReasoningItem(Fields):
    type: Literal["reasoning"]
    summary: Several[Part] = []  # noqa: RUF012
    content: Several[Part] = []  # noqa: RUF012
    encrypted_content: String = ""

    def add(self, messages: list[Message]) -> None:
        """Add the item to the messages of a chat."""
        text = self.encrypted_content.removeprefix(ENCRYPTED)
        if not self.encrypted_content.startswith(ENCRYPTED):
            text = text_of(parts_of(self.content)) or text_of(parts_of(self.summary))
        _write(messages, "reasoning_content", text)


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool. custom: Whether the tool's input is a text instead of JSON."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def shown(self) -> str:
        """The name by which the model knows the tool."""
        space = "" if self.namespace is None else f"{self.namespace.rstrip('_')}__"
        return f"{space}{self.name}"[-LONGEST_TOOL_NAME:]


class CallItem(Fields):
    """A call in an earlier response."""

    name: String
    namespace: String | None = None
    call_id: String

    def call(self, messages: list[Message], arguments: str | Object) -> None:
        """Add the call to the messages of a chat."""
        function = {"name": ToolName(self.name, self.namespace).shown, "arguments": arguments}
        calls = _turn(messages).setdefault("tool_calls", [])
        calls.append({"id": self.call_id, "function": function})


class FunctionCall(CallItem):
    type: Literal["function_call"]
    arguments: String

    def add(self, messages: list[Message]) -> None:
        """Add the item to the messages of a chat."""
        self.call(messages, self.arguments)


class CustomCall(CallItem):
    type: Literal["custom_tool_call"]
    input: String

    def add(self, messages: list[Message]) -> None:
        """Add the item to the messages of a chat."""
        self.call(messages, {"input": self.input})


class CallOutput(Fields):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: String
    output: Content

    def add(self, messages: list[Message]) -> None:
        """Add the item to the messages of a chat."""
        content = text_of(parts_of(self.output))
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": content})


class OtherItem(Fields):
    """An item of an unknown type. Clients often add new types."""

    type: String

    def add(self, messages: list[Message]) -> None:
        """Skip the item."""
        log_once(SKIPPED, "an input item", self.type[:LONGEST_TOOL_NAME])


ResponseItem = Annotated[
    MessageItem | ReasoningItem | FunctionCall | CustomCall | CallOutput | OtherItem,
    ByType("a message with role and content, or an item with a type and its fields"),
]
OUTPUT: TypeAdapter[Sequence[Item]] = TypeAdapter(list[ResponseItem])
"""Reads the items of a response as items of an input."""


class CustomFormat(Fields):
    model_config = ConfigDict(extra="allow")
    definition: String | None = None


class CallableTool(Fields):
    """A tool that the model can call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function", "custom"]
    name: Name
    description: String | None = None
    parameters: Parameters | None = None
    format: CustomFormat | None = None

    def named(self, space: str | None = None) -> dict[ToolName, Function]:
        """Return the function that the model sees, by the client's name. The grammar of a custom
        tool's input is shown, but not enforced."""
        name, custom = ToolName(self.name, space, self.type == "custom"), self.type == "custom"
        described, parameters = self.description, CUSTOM if custom else self.parameters
        if custom and self.format is not None and self.format.definition:
            grammar = f"The input follows this grammar:\n{self.format.definition}"
            described = f"{described or ''}\n\n{grammar}".strip()
        fields = {"name": name.shown, "description": described, "parameters": parameters}
        return {name: Function.model_construct(None, **fields)}


class OtherTool(Fields):
    """A tool of an unknown type."""

    model_config = ConfigDict(extra="allow")
    type: String

    def named(self, space: str | None = None) -> dict[ToolName, Function]:
        """Skip the tool."""
        log_once(SKIPPED, "a tool", self.type[:LONGEST_TOOL_NAME])
        return {}


TOOL = ByType("a tool with a type, such as a function with name and parameters")


class Namespace(Fields):
    model_config = ConfigDict(extra="allow")
    type: Literal["namespace"]
    name: Name
    tools: Several[Annotated[CallableTool | OtherTool, TOOL]]

    def named(self, space: str | None = None) -> dict[ToolName, Function]:
        """Return the functions that the model sees, by the client's names."""
        return {
            name: function
            for tool in self.tools
            for name, function in tool.named(self.name).items()
        }


class CalledTool(Fields):
    model_config = ConfigDict(extra="allow")
    type: Literal["function", "custom"]
    name: String
    namespace: String | None = None

    def choice(self) -> ToolChoice:
        """Return the choice."""
        return ToolChoice("required", ToolName(self.name, self.namespace).shown)


class OtherChoice(Fields):
    """A tool of an unknown type."""

    model_config = ConfigDict(extra="allow")
    type: String

    def choice(self) -> ToolChoice:
        """Return the default choice."""
        return ToolChoice()


class AllowedTools(Fields):
    model_config = ConfigDict(extra="allow")
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Several[Annotated[CalledTool | OtherChoice, TOOL]], Field(min_length=1)]

    def choice(self) -> ToolChoice:
        """Return the choice."""
        names = frozenset(name for tool in self.tools if (name := tool.choice().name))
        return ToolChoice(self.mode, allowed=names)


ResponseChoice = Annotated[
    CalledTool | AllowedTools | OtherChoice | OneOf,
    ByType('"none", "auto", "required", or a tool such as {"type": "function", "name": ...}'),
]
InputItems = Annotated[Several[ResponseItem], Field(min_length=1, max_length=MESSAGES)]


class InputTokensRequest(Body, Thoughtful):
    """The body of /v1/responses/input_tokens."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {"conversation": (), "prompt": ()}
    input: String | InputItems
    instructions: String | None = None
    previous_response_id: String | None = None
    tools: Annotated[
        Several[Annotated[CallableTool | Namespace | OtherTool, TOOL]], Field(max_length=TOOLS)
    ] = []  # noqa: RUF012
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: Boolean | None = None

    def items(self) -> Sequence[Item]:
        """Return the input as items."""
        if not isinstance(self.input, str):
            return self.input
        return [MessageItem(role="user", content=self.input)]

    def named_tools(self) -> dict[ToolName, Function]:
        """Return the tools that the model can call, including tools in namespaces."""
        return {name: function for tool in self.tools for name, function in tool.named().items()}

    def chat(self, before: Iterable[Item]) -> Chat:
        """Return the conversation. before: The items of the conversation that the request
        continues. Raises Problem."""
        messages: list[Message] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in [*before, *self.items()]:
            item.add(messages)
        choice = choice_of(self.tool_choice)
        return Chat(
            messages or [{"role": "user", "content": ""}],
            Tools.of(self.named_tools().values(), choice, self.parallel_tool_calls),
            self.variables(),
            self.thinking_budget(),
        )


class TextSettings(Fields):
    model_config = ConfigDict(extra="allow")
    format: (
        Annotated[
            TextFormat | ObjectFormat | SchemaFormat,
            ByType('of the type "text", "json_object" or "json_schema"'),
        ]
        | None
    ) = None


class ResponsesRequest(InputTokensRequest, Sampled):
    """The body of /v1/responses. Codex treats a cut answer as a failure, so the default for
    max_tokens is no limit."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **InputTokensRequest.refused,
        "background": (False,),
        "top_logprobs": (0,),
    }
    max_tokens: MaxTokens = Field(
        -1, validation_alias=AliasChoices("max_output_tokens", "max_tokens")
    )
    stream: Boolean | None = None
    structured_outputs: StructuredOutputs | None = None
    text: TextSettings | None = None
    include: Several[String] = []  # noqa: RUF012
    store: Boolean = True
    metadata: Object | None = None
    max_tool_calls: Any = None
    user: String | None = None
    safety_identifier: String | None = None
    prompt_cache_key: String | None = None
    service_tier: String | None = None
    truncation: String | None = None

    def wanted(self) -> Wanted:
        """Return the wishes of the client, except for the prompt."""
        form, outputs = self.text and self.text.format, self.structured_outputs
        found = [] if outputs is None else outputs.constraints()
        if form and (constraint := form.constraint("text")) is not None:
            found.append(constraint)
        if len(found) > 1:
            raise invalid("text.format and structured_outputs cannot be combined", "text")
        return Wanted(self, next(iter(found), None))
