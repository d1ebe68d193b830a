"""The internal request: what a client asks for, whatever API it uses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

from ..core.options import (
    LARGEST_BIAS,
    MOST_DRAFTED,
    REPETITION_PENALTIES,
    TEMPERATURE_LIMITS,
)
from ..text.chat import Ending
from ..text.messages import Message, Tool
from .fields import (
    Boolean,
    Fields,
    Number,
    Several,
    String,
    integral,
    worded,
)
from .problems import invalid

STOPS, STOP_LENGTH, BIASES, TOOLS = 16, 1024, 1024, 128
"""Largest numbers of stop strings, of characters of one, of entries in logit_bias, and of tools."""
MaxTokens = Annotated[
    StrictInt,
    Field(ge=-1),
    integral,
    worded("a whole number from 0 on, or -1 for no limit"),
]
Count = Annotated[StrictInt, Field(ge=1), integral]
Penalty = Annotated[Number, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
Share = Annotated[Number, Field(ge=0, le=1)]
Stop = Annotated[String, Field(max_length=STOP_LENGTH)]
Stops = Annotated[Several[Stop], Field(max_length=STOPS)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


few = BeforeValidator(
    lambda value: None if isinstance(value, dict) and len(value) > BIASES else value
)
# There is no lower limit: a very low bias excludes a token.
Biases = Annotated[
    dict[TokenId, Annotated[Number, Field(le=LARGEST_BIAS)]],
    few,
    worded(f'at most {BIASES} token ids with numbers, as in {{"42": -5}}'),
]


class Speculative(Fields):
    """The largest number of draft tokens in a round. `false` in place of the object means 0."""

    model_config = ConfigDict(extra="forbid")
    max: Annotated[StrictInt, Field(ge=0, le=MOST_DRAFTED), integral] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_switch(cls, data: Any) -> Any:
        return ({} if data else {"max": 0}) if isinstance(data, bool) else data


class Sampled(Fields):
    """Settings of sampling, and of the end of a completion. A field that is None has the default of
    the server."""

    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1), integral] | None = None
    temperature: Annotated[Number, Field(ge=0, le=TEMPERATURE_LIMITS[1])] | None = None
    top_p: Share | None = None
    top_k: Annotated[StrictInt, Field(ge=-1), integral] | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[Number, Field(ge=0, le=0.5)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[Number, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] | None
    ) = Field(None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"))
    repeat_last_n: Annotated[StrictInt, Field(ge=-1), integral] | None = None
    logit_bias: Biases | None = None
    stop: Stop | Stops | None = None
    max_tokens: MaxTokens | None = None
    ignore_eos: Boolean | None = None
    exact: Boolean | None = None
    target_lang: String | None = None
    source_lang: String | None = None
    truncate_prompt_tokens: Count | None = None
    speculative: (
        Annotated[Speculative, worded(f'true, false, or {{"max": 4}} with at most {MOST_DRAFTED}')]
        | None
    ) = None


@dataclass(frozen=True)
class TextConstraint:
    """A schema, a regular expression or a grammar that a text has to match. kind: The name of the
    option. field: The field of the body."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    field: str = "response_format"


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may or must call.

    Attributes:
        name: The only tool that may be called, which must be called, or "".
        allowed: The names of the tools that it sees, or None for all.
        field: The field with the choice.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str = ""
    allowed: frozenset[str] | None = None
    field: Literal["tool_choice", "function_call"] = "tool_choice"


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call.

    Attributes:
        listed: The tools, in the format of chat templates.
        must: If a call is demanded, the names of the tools that may be called, or else ().
        most_calls: Largest number of calls, or None for any number.
        schema: JSON schema of an answer without a call, or "" for a free answer.
    """

    listed: tuple[Tool, ...] = ()
    must: tuple[str, ...] = ()
    most_calls: int | None = None
    schema: str = ""

    @classmethod
    def of(cls, tools: Iterable[Tool], choice: ToolChoice, parallel: bool | None = None) -> Self:
        """Return the tools of a chat. A later tool replaces a tool of the same name. parallel:
        Whether an answer may have several calls, which is the default. Raises Problem."""
        named = {tool["function"]["name"]: tool for tool in tools}
        field, demanded = choice.field, choice.mode == "required"
        if choice.allowed is not None:
            named = {name: tool for name, tool in named.items() if name in choice.allowed}
            if not named:
                raise invalid(f"{field} allows none of the functions in tools", field)
        if demanded and not named:
            given = "tools" if field == "tool_choice" else "functions"
            raise invalid(f"{field} asks for a call: give {given}", field)
        if choice.name and choice.name not in named:
            message = f"{field} names {choice.name:.80}, which is none of the functions"
            raise invalid(message, field)
        if choice.mode == "none":
            return cls()  # the model does not call a tool that is not in its prompt
        listed, most = tuple(named.values()), 1 if parallel is False else None
        if choice.name:
            return cls(listed, (choice.name,), 1)
        return cls(listed, tuple(named) if demanded else (), most)


@dataclass(frozen=True)
class Chat:
    """A conversation that the model continues.

    Attributes:
        messages: The messages, as `text.messages.messages_of` reads them.
        variables: Variables of the chat template.
        thinking_budget: Largest number of tokens of thoughts, or None for the server's default.
        ending: How the prompt ends.
    """

    messages: Sequence[Message] = ()
    tools: Tools = Tools()
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    ending: Ending = "answer"


@dataclass(frozen=True)
class Wanted:
    """The wishes of a client, except for the prompt.

    Attributes:
        top_logprobs: Number of alternatives of each token, or None for no log-probabilities.
        count: Number of completions of each prompt.
        prediction: A text that the completion may turn out to have.
    """

    sampling: Sampled
    constraint: TextConstraint | None = None
    top_logprobs: int | None = None
    count: int = 1
    prediction: str = ""
