"""Models of parts of bodies that several wire formats share: contents of messages, tools, thoughts,
and constraints."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ..text.chat import RESERVED, Ending
from ..text.messages import LONGEST_TOOL_NAME, TEXT_PART_FIELDS, Message, Tool, shown_name
from .fields import Boolean, Fields, Kinds, Object, Refused, Several, Typed, Written, either, number
from .internal import Chat, ConstraintKind, TextConstraint, ToolChoice, Tools
from .problems import invalid

Role = Literal["system", "developer", "user", "assistant", "tool"]
Budget = Annotated[int, Field(ge=0), number]
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on or off: the first one in templates of Qwen, GLM and
others, the second one in templates of DeepSeek, Granite and Kimi."""
UNSEEN = {"type", "cache_control", "defer_loading", "eager_input_streaming"}
"""Keys of tools that are meant for the server and not for the model."""


# Contents.
class ContentPart(Typed):
    """A part of a message's content. The model sees a note in place of other types."""

    kinds: ClassVar[Kinds] = {
        **{kind: (field,) for kind, field in TEXT_PART_FIELDS.items()},
        "thinking": (),
    }
    text: str | None = None
    refusal: str | None = None
    thinking: str | Several["ContentPart"] | None = None


Content = str | Several[ContentPart]


class ReasoningDetail(Fields):
    """A part of the reasoning in OpenRouter's format."""

    text: str | None = None
    summary: str | None = None


class CalledFunction(Fields):
    name: str
    arguments: str | Object | None = None


class EarlierCall(Fields):
    """A call in an earlier message."""

    id: Any = None
    function: CalledFunction


class ChatMessage(Fields):
    """A message of a chat. Clients send the reasoning of earlier messages in one of four fields."""

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    tool_calls: Several[EarlierCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    reasoning_details: Several[ReasoningDetail] | None = None

    def message(self) -> Message:
        """Return the message as `text.messages` reads it. Raises Problem."""
        if self.content is None and self.role != "assistant":
            message = "all messages but those of the assistant must have a content"
            raise invalid(message, "messages")
        return self.model_dump(exclude_none=True)


# Tools.
class Parameters(Fields, extra="allow"):
    """The JSON schema of the arguments of a function."""

    properties: dict[str, dict[str, Any] | Boolean] | None = None
    required: Several[str] | None = None


class Function(Typed, extra="allow"):
    """A function that the model may call. Chat templates see its other fields, too."""

    kinds: ClassVar[Kinds] = {"function": ("name",)}
    type: Literal["function"] = "function"
    name: Annotated[str, Field(pattern=f"^[A-Za-z0-9_.-]{{1,{LONGEST_TOOL_NAME}}}$")] = ""
    description: str | None = None
    parameters: Parameters | None = None

    @property
    def tool(self) -> Tool:
        """The function in the format of chat templates."""
        function = self.model_dump(exclude=UNSEEN, exclude_none=True)
        return {"type": "function", "function": function}


class Choosing(Typed, extra="allow"):
    """A tool that must be called, or the tools that may be called. A tool of an unknown type cannot
    be called."""

    kinds: ClassVar[Kinds] = {
        **dict.fromkeys(("function", "custom"), ("name",)),
        "allowed_tools": ("mode", "tools"),
    }
    type: str = "function"
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[Several["Choosing"], Field(min_length=1)] = []  # noqa: RUF012

    def choice(self) -> ToolChoice:
        """Return the choice."""
        if self.type == "allowed_tools":
            names = frozenset(name for tool in self.tools if (name := tool.choice().name))
            return ToolChoice(self.mode, allowed=names)
        name = shown_name(self.name, self.namespace)
        return ToolChoice("required", name) if name else ToolChoice()


# Thoughts.
class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class Reasoning(Fields, extra="allow"):
    effort: str | None = None
    max_tokens: Budget | None = None


class TemplateVariables(Fields, extra="allow"):
    refused: ClassVar[Refused] = dict.fromkeys(sorted(RESERVED), ())


class Thoughtful(Fields):
    """The fields of a chat by which clients turn thoughts on or off, and set their budget."""

    thinking: Thinking = Thinking(type="adaptive")
    reasoning: Reasoning = Reasoning()
    reasoning_effort: str | None = None
    enable_thinking: Boolean | None = None
    chat_template_kwargs: TemplateVariables = TemplateVariables()

    def chat_of(self, messages: Sequence[Message], tools: Tools, ending: Ending = "answer") -> Chat:
        """Return a conversation. chat_template_kwargs takes precedence over other fields. Of the
        budgets in Anthropic's and OpenRouter's fields, the smaller number holds."""
        thinks, effort = self.enable_thinking, self.reasoning_effort or self.reasoning.effort
        if thinks is None:
            states = {"enabled": True, "disabled": False}
            thinks = False if effort == "none" else states.get(self.thinking.type)
        variables = {
            **({"reasoning_effort": effort} if effort and effort != "none" else {}),
            **({} if thinks is None else dict.fromkeys(SWITCHES, thinks)),
            **(self.chat_template_kwargs.model_extra or {}),
        }
        budgets = self.thinking.budget_tokens, self.reasoning.max_tokens
        budget = min((budget for budget in budgets if budget is not None), default=None)
        return Chat(messages, tools, variables, budget, ending)


class ToolChoosing(Thoughtful):
    """The fields of OpenAI's chats that say which tools may be called."""

    tool_choice: Choosing | Literal["none", "auto", "required"] = "auto"
    parallel_tool_calls: Boolean | None = None

    def chosen(self, tools: Iterable[Function]) -> Tools:
        """Return the tools that the model may call. Raises Problem."""
        wanted = self.tool_choice
        choice = wanted.choice() if isinstance(wanted, Choosing) else ToolChoice(wanted)
        return Tools.of([tool.tool for tool in tools], choice, self.parallel_tool_calls)


# Constraints.
unset = BeforeValidator(lambda value: None if value == "" else value)
"""An annotation for optional fields. Some clients send "" for a field that they do not set."""
Unset = Annotated[Written | None, unset]
Choices = Annotated[Several[str], Field(min_length=1)]
CONSTRAINTS: Mapping[str, ConstraintKind]
CONSTRAINTS = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "grammar"}
"""vLLM's names of constraints -> the names of the options."""


class Format(Typed, extra="allow"):
    """The format of an answer."""

    kinds: ClassVar[Kinds] = {"text": (), "json_object": (), "json_schema": ("schema",)}
    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[Object, Field(alias="schema")] = {"type": "object"}  # noqa: RUF012

    def constraints(self, field: str) -> list[TextConstraint]:
        """Return the constraint of the format, unless it is a text. field: The field that errors
        name."""
        free = self.type == "text"
        return [] if free else [TextConstraint("json_schema", self.schema_, field)]


class Formatted(Fields, extra="allow"):
    """An object with the format of an answer. Its other fields are only hints."""

    format: Format = Format(type="text")


class VllmConstraints(Fields):
    """vLLM's forms of constraints, also with the names of its older versions."""

    json_: Annotated[Written | Object | None, unset] = either(None, "json", "guided_json")
    regex: Unset = either(None, "regex", "guided_regex")
    grammar: Unset = either(None, "grammar", "guided_grammar")
    choice: Choices | None = either(None, "choice", "guided_choice")

    def constraints(self) -> list[TextConstraint]:
        """Return all constraints."""
        choices = " | ".join(map(json.dumps, self.choice or ()))
        values = self.json_, self.regex, self.grammar, f"start: {choices}" if choices else None
        return [
            TextConstraint(kind, value, name)
            for (name, kind), value in zip(CONSTRAINTS.items(), values, strict=True)
            if value is not None
        ]


class StructuredOutputs(VllmConstraints, extra="forbid"):
    """vLLM's object with one constraint."""


class Constrained(VllmConstraints):
    """The fields with constraints."""

    response_format: Format = Format(type="text")
    structured_outputs: StructuredOutputs | None = None

    def constraints(self) -> list[TextConstraint]:
        """Return the constraints of all fields. Raises Problem."""
        outputs, field = self.structured_outputs, "structured_outputs"
        inner = [] if outputs is None else outputs.constraints()
        if outputs is not None and len(inner) != 1:
            rule = "structured_outputs must have exactly one of json, regex, grammar and choice"
            raise invalid(rule, field)
        of_answer = self.response_format.constraints("response_format")
        return [*(replace(one, field=field) for one in inner), *of_answer, *super().constraints()]
