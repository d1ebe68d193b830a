"""Models of parts of bodies that several wire formats share: contents of messages, tools, thoughts,
and constraints."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from ..text.chat import RESERVED
from ..text.messages import TEXT_PART_FIELDS, Message, Tool
from .fields import Boolean, Fields, Kinds, Object, Refused, Several, Typed, number
from .internal import TextConstraint, ToolChoice
from .problems import invalid

Written = Annotated[str, Field(pattern=r"\S")]
JsonSchema = Object
Role = Literal["system", "developer", "user", "assistant", "tool"]
OneOf = Literal["none", "auto", "required"]
Budget = Annotated[int, Field(ge=0), number]
THINKING_STATES = {"enabled": True, "disabled": False}
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on or off: the first one in templates of Qwen, GLM and
others, the second one in templates of DeepSeek, Granite and Kimi."""
UNSEEN = {"type", "cache_control", "defer_loading", "eager_input_streaming"}
"""Keys of tools that are meant for the server and not for the model."""
LONGEST_TOOL_NAME = 128
"""Largest number of characters of a tool's name, as in Anthropic's API. OpenAI's takes 64."""


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

    def part(self) -> Message:
        """Return the part as `text.messages` reads it."""
        return self.model_dump(include={"type", *ContentPart.model_fields}, exclude_none=True)


Content = str | Several[ContentPart]


def parts_of(content: str | Sequence[ContentPart]) -> str | list[Message]:
    """Return a content as `text.messages` reads it."""
    return content if isinstance(content, str) else [part.part() for part in content]


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
        """Return the message as `text.messages` reads it."""
        return self.model_dump(exclude_none=True)


# Tools.
class Parameters(Fields):
    """The JSON schema of the arguments of a function."""

    model_config = ConfigDict(extra="allow")
    properties: dict[str, dict[str, Any] | Boolean] | None = None
    required: Several[str] | None = None


Name = Annotated[str, Field(pattern=f"^[A-Za-z0-9_.-]{{1,{LONGEST_TOOL_NAME}}}$")]


class Function(Typed):
    """A function that the model may call. Chat templates see its other fields, too."""

    model_config = ConfigDict(extra="allow")
    kinds: ClassVar[Kinds] = {"function": ("name",)}
    type: Literal["function"] = "function"
    name: Name = ""
    description: str | None = None
    parameters: Parameters | None = None

    @property
    def tool(self) -> Tool:
        """The function in the format of chat templates."""
        function = self.model_dump(exclude=UNSEEN, exclude_none=True)
        return {"type": "function", "function": function}


ToolList = Several[Function]


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool. namespace: The tool's namespace in OpenAI's
    Responses API."""
    space = "" if namespace is None else f"{namespace.rstrip('_')}__"
    return f"{space}{name}"[-LONGEST_TOOL_NAME:]


class Choosing(Typed):
    """A tool that must be called, or the tools that may be called. A tool of an unknown type cannot
    be called."""

    model_config = ConfigDict(extra="allow")
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


def choice_of(choice: OneOf | Choosing | None) -> ToolChoice:
    """Return a choice of tools."""
    return choice.choice() if isinstance(choice, Choosing) else ToolChoice(choice or "auto")


# Thoughts.
class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class Reasoning(Fields):
    model_config = ConfigDict(extra="allow")
    effort: str | None = None
    max_tokens: Budget | None = None


class TemplateVariables(Fields):
    model_config = ConfigDict(extra="allow")
    refused: ClassVar[Refused] = dict.fromkeys(sorted(RESERVED), ())


class Thoughtful(Fields):
    """The fields by which clients turn thoughts on or off, and set their budget."""

    thinking: Thinking = Thinking(type="adaptive")
    reasoning: Reasoning = Reasoning()
    reasoning_effort: str | None = None
    enable_thinking: Boolean | None = None
    chat_template_kwargs: TemplateVariables = TemplateVariables()

    def variables(self) -> Object:
        """Return the variables of the chat template. chat_template_kwargs takes precedence."""
        thinks, effort = self.enable_thinking, self.reasoning_effort or self.reasoning.effort
        if thinks is None:
            thinks = False if effort == "none" else THINKING_STATES.get(self.thinking.type)
        return {
            **({"reasoning_effort": effort} if effort and effort != "none" else {}),
            **({} if thinks is None else dict.fromkeys(SWITCHES, thinks)),
            **(self.chat_template_kwargs.model_extra or {}),
        }

    def thinking_budget(self) -> int | None:
        """Return the largest number of tokens of thoughts, or None. Of Anthropic's and OpenRouter's
        fields, the smaller number holds."""
        budgets = self.thinking.budget_tokens, self.reasoning.max_tokens
        return min((budget for budget in budgets if budget is not None), default=None)


# Constraints.
unset = BeforeValidator(lambda value: None if value == "" else value)
"""An annotation for optional fields. Some clients send "" for a field that they do not set."""
Unset = Annotated[Written | None, unset]
Choices = Annotated[Several[str], Field(min_length=1)]


def schema_constraint(schema: str | Object, field: str) -> TextConstraint:
    """Return the constraint by a JSON schema. field: The field that errors name."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return TextConstraint("json_schema", text, field)


class Format(Typed):
    """The format of an answer."""

    model_config = ConfigDict(extra="allow")
    kinds: ClassVar[Kinds] = {"text": (), "json_object": (), "json_schema": ("schema",)}
    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")] = {"type": "object"}  # noqa: RUF012

    def constraints(self, field: str) -> list[TextConstraint]:
        """Return the constraint of the format, unless it is a text. field: See
        `schema_constraint`."""
        return [] if self.type == "text" else [schema_constraint(self.schema_, field)]


class VllmConstraints(Fields):
    """vLLM's forms of constraints, also with the names of its older versions."""

    json_: Annotated[Written | JsonSchema | None, unset] = Field(
        None, validation_alias=AliasChoices("json", "guided_json")
    )
    regex: Unset = Field(None, validation_alias=AliasChoices("regex", "guided_regex"))
    grammar: Unset = Field(None, validation_alias=AliasChoices("grammar", "guided_grammar"))
    choice: Choices | None = Field(None, validation_alias=AliasChoices("choice", "guided_choice"))

    def constraints(self, field: str = "") -> list[TextConstraint]:
        """Return all constraints. field: The field that errors name, if it is the same for all."""
        choices = " | ".join(map(json.dumps, self.choice or ()))
        found = [] if self.json_ is None else [schema_constraint(self.json_, field or "json")]
        if self.regex:
            found.append(TextConstraint("regex", self.regex, field or "regex"))
        if self.grammar:
            found.append(TextConstraint("grammar", self.grammar, field or "grammar"))
        if choices:
            found.append(TextConstraint("grammar", f"start: {choices}", field or "choice"))
        return found


class StructuredOutputs(VllmConstraints):
    model_config = ConfigDict(extra="forbid")


class Constrained(VllmConstraints):
    """The fields with constraints."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraints(self, field: str = "") -> list[TextConstraint]:
        """Return the constraints of all fields. Raises Problem."""
        outputs, answer = self.structured_outputs, self.response_format
        found = [] if outputs is None else outputs.constraints("structured_outputs")
        if outputs is not None and len(found) != 1:
            rule = "structured_outputs must have exactly one of json, regex, grammar and choice"
            raise invalid(rule, "structured_outputs")
        found += [] if answer is None else answer.constraints("response_format")
        return [*found, *super().constraints()]
