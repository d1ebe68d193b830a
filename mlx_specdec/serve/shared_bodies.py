"""Models of parts of bodies that several wire formats share: contents of messages, thoughts, and
constraints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, StrictInt, model_validator

from ..text.chat import RESERVED
from ..text.messages import Message
from .fields import Boolean, ByType, Fields, Object, Several, String, broken, integral, worded
from .internal import TextConstraint

Written = Annotated[String, Field(pattern=r"\S"), worded("a non-blank string")]
JsonSchema = Annotated[Object, worded("a JSON schema, an object")]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
OneOf = Literal["none", "auto", "required"]
Budget = Annotated[StrictInt, Field(ge=0), integral]
THINKING_STATES = {"enabled": True, "disabled": False}
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on or off: the first one in templates of Qwen, GLM and
others, the second one in templates of DeepSeek, Granite and Kimi."""


# Contents.
@dataclass
class Turn:
    """A message of Anthropic's API: the parts of its text, its calls, and results of calls, which
    are messages of their own."""

    parts: list[Message] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


class BasePart(Fields):
    """A part of a message's content."""

    def part(self) -> Message:
        """Return the part as `text.messages` reads it."""
        return self.model_dump(exclude_none=True)

    def add(self, turn: Turn) -> None:
        """Add the part to a turn."""
        turn.parts.append(self.part())


class TextPart(BasePart):
    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text"]
    text: String


class RefusalPart(BasePart):
    type: Literal["refusal"]
    refusal: String


class ThinkingPart(BasePart):
    type: Literal["thinking"]
    thinking: String | Several[TextPart] | None = None


class Other(BasePart):
    """A part, an item or a tool of an unknown type."""

    type: String


Part = Annotated[
    TextPart | RefusalPart | ThinkingPart | Other,
    ByType('a part with a type, such as {"type": "text", "text": ...}'),
]
Content = String | Several[Part]


def parts_of(content: str | Sequence[BasePart]) -> str | list[Message]:
    """Return a content as `text.messages` reads it."""
    return content if isinstance(content, str) else [part.part() for part in content]


class ReasoningDetail(Fields):
    """A part of the reasoning in OpenRouter's format."""

    text: String | None = None
    summary: String | None = None


class Reasoned(Fields):
    """The fields in which clients send the reasoning of earlier messages."""

    reasoning_content: String | None = None
    reasoning: String | None = None
    thinking: String | None = None
    reasoning_details: Several[ReasoningDetail] | None = None


class CalledFunction(Fields):
    name: String
    arguments: String | Object | None = None


class EarlierCall(Fields):
    """A call in an earlier message."""

    id: Any = None
    function: CalledFunction


# Thoughts.
class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class Reasoning(Fields):
    model_config = ConfigDict(extra="allow")
    effort: String | None = None
    max_tokens: Budget | None = None


class TemplateVariables(Fields):
    model_config = ConfigDict(extra="allow")
    refused: ClassVar[Mapping[str, Sequence[object]]] = dict.fromkeys(sorted(RESERVED), ())


class Thoughtful(Fields):
    """The fields by which clients turn thoughts on or off, and set their budget."""

    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: String | None = None
    enable_thinking: Boolean | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def variables(self) -> Object:
        """Return the variables of the chat template. chat_template_kwargs takes precedence."""
        thinks = self.enable_thinking
        effort = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        if thinks is None:
            thinks = None if self.thinking is None else THINKING_STATES.get(self.thinking.type)
            thinks = False if effort == "none" else thinks
        own = self.chat_template_kwargs
        return {
            **({"reasoning_effort": effort} if effort and effort != "none" else {}),
            **({} if thinks is None else dict.fromkeys(SWITCHES, thinks)),
            **({} if own is None else own.__pydantic_extra__ or {}),
        }

    def thinking_budget(self) -> int | None:
        """Return the largest number of tokens of thoughts, or None. Of Anthropic's and OpenRouter's
        fields, the smaller number holds."""
        budgets = (
            None if self.thinking is None else self.thinking.budget_tokens,
            None if self.reasoning is None else self.reasoning.max_tokens,
        )
        return min((budget for budget in budgets if budget is not None), default=None)


# Constraints.
unset = BeforeValidator(lambda value: None if value == "" else value)
"""An annotation for optional fields. Some clients send "" for a field that they do not set."""
Unset = Annotated[Written | None, unset]
Choices = Annotated[
    Several[String],
    Field(min_length=1),
    worded("a non-empty list, each entry of which is a string", inside=True),
]


Kind = Literal["json", "regex", "grammar", "choice"]
"""The forms of constraints in vLLM's API."""


def constraint_of(kind: Kind, value: Any, field: str) -> TextConstraint | None:
    """Return a constraint, or None without a value. field: The field that errors name."""
    if value is None:
        return None
    if kind == "json":
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return TextConstraint("json_schema", text, field)
    if kind == "choice":
        return TextConstraint("grammar", f"start: {' | '.join(map(json.dumps, value))}", field)
    return TextConstraint(kind, value, field)


class TextFormat(Fields):
    type: Literal["text"]

    def constraint(self, field: str) -> TextConstraint | None:
        """Return the constraint that the format is."""
        return None


class ObjectFormat(Fields):
    type: Literal["json_object"]
    # Named as in llama.cpp and as in TGI.
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    value: JsonSchema | None = None

    def constraint(self, field: str) -> TextConstraint | None:
        """Return the constraint that the format is."""
        schema = self.schema_ or self.value or {"type": "object"}
        return constraint_of("json", schema, field)


class SchemaFormat(Fields):
    """A JSON schema. OpenAI's chat completions have it one level deeper, in `json_schema`."""

    model_config = ConfigDict(extra="allow")
    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]

    @model_validator(mode="before")
    @classmethod
    def _lift(cls, data: Any) -> Any:
        inner = data.get("json_schema") if isinstance(data, dict) else None
        return {**inner, "type": "json_schema"} if isinstance(inner, dict) else data

    def constraint(self, field: str) -> TextConstraint | None:
        """Return the constraint that the format is."""
        return constraint_of("json", self.schema_, field)


ResponseFormat = Annotated[
    TextFormat | ObjectFormat | SchemaFormat,
    ByType(
        '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
        '{"schema": {...}}}'
    ),
]


class StructuredOutputs(Fields):
    model_config = ConfigDict(extra="forbid")
    json_: Annotated[Written | JsonSchema | None, unset, Field(alias="json")] = None
    regex: Unset = None
    grammar: Unset = None
    choice: Choices | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.constraints()) != 1:
            field = "structured_outputs"
            rule = f"{field} must have exactly one of json, regex, grammar and choice"
            raise broken(rule, field)
        return self

    def constraints(self) -> list[TextConstraint]:
        """Return the constraints of all fields."""
        values: dict[Kind, Any] = {"json": self.json_, "regex": self.regex}
        values |= {"grammar": self.grammar, "choice": self.choice}
        return [*filter(None, (constraint_of(*of, "structured_outputs") for of in values.items()))]


class Constrained(Fields):
    """The fields with constraints. A body may have only one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: Unset = None
    grammar: Unset = None
    guided_json: Annotated[Written | JsonSchema | None, unset] = None
    guided_regex: Unset = None
    guided_grammar: Unset = None
    guided_choice: Choices | None = None
    ignore_eos: Boolean | None = None

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        found = self.constraints()
        if len(found) > 1:
            names = ", ".join(name for name in Constrained.model_fields if name != "ignore_eos")
            rule = f"at most one of {names} may be given: leave the others out"
            raise broken(rule, "response_format")
        if found and self.ignore_eos:
            rule = "ignore_eos cannot be combined with a format or grammar, which ends the text"
            raise broken(rule, "ignore_eos")
        return self

    def constraints(self) -> list[TextConstraint]:
        """Return the constraints of all fields. A valid body has at most one."""
        outputs, answer = self.structured_outputs, self.response_format
        return [
            *([] if outputs is None else outputs.constraints()),
            *filter(
                None,
                (
                    None if answer is None else answer.constraint("response_format"),
                    constraint_of("regex", self.regex, "regex"),
                    constraint_of("grammar", self.grammar, "grammar"),
                    constraint_of("json", self.guided_json, "guided_json"),
                    constraint_of("regex", self.guided_regex, "guided_regex"),
                    constraint_of("grammar", self.guided_grammar, "guided_grammar"),
                    constraint_of("choice", self.guided_choice, "guided_choice"),
                ),
            ),
        ]
