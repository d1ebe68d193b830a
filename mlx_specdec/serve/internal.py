"""The internal request: what a client asks for, whatever API it uses."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field

from ..core.options import (
    LARGEST_BIAS,
    LEAST_TOP_P,
    MOST_DRAFTED,
    REPETITION_PENALTIES,
    TEMPERATURE_LIMITS,
)
from ..text.chat import Ending
from ..text.messages import Message, Tool
from .fields import ENTRIES, Boolean, Fields, Object, Refused, Several, either, number
from .problems import invalid

Limit = Annotated[int, Field(ge=-1), number]
"""A largest number, or -1 for no limit."""
Count = Annotated[int, Field(ge=1), number]
Penalty = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS), number]
Factor = Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1]), number]
Share = Annotated[float, Field(ge=0, le=1), number]

_or_ban = AfterValidator(lambda bias: -math.inf if bias < -LARGEST_BIAS else bias)
Bias = Annotated[float, Field(le=LARGEST_BIAS), _or_ban]
"""A bias, which has no lower limit: a very low one excludes a token."""
Biases = Annotated[dict[Annotated[int, Field(ge=0)], Bias], Field(max_length=ENTRIES)]


class Speculative(Fields):
    """The largest number of draft tokens in a round."""

    model_config = ConfigDict(extra="forbid")
    max: Annotated[int, Field(ge=0, le=MOST_DRAFTED), number] | None = None


class Sampled(Fields):
    """Settings of sampling, and of the end of a completion, with the values of Options. A field
    that is None has the default of the server."""

    refused: ClassVar[Refused] = {
        **dict.fromkeys(("adapter_id", "adapters", "allowed_token_ids", "audio", "container"), ()),
        **dict.fromkeys(("chat_template", "frequency_context_size", "json_schema"), ()),
        **dict.fromkeys(("presence_context_size", "repetition_context_size", "role_mapping"), ()),
        **dict.fromkeys(("bad_words", "documents", "mcp_servers", "stop_token_ids"), ([],)),
        **dict.fromkeys(("dry_multiplier", "dynatemp_range", "min_tokens", "mirostat"), (0,)),
        **dict.fromkeys(("background", "decoder_input_details", "use_beam_search"), (False,)),
        **dict.fromkeys(("include_stop_str_in_output", "watermark"), (False,)),
        **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
        "modalities": (["text"],),
        "skip_special_tokens": (True,),
        "top_n_tokens": (0,),
        "web_search_options": (),
    }
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), number] | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_LIMITS[1]), number] | None = None
    # With 0, only the likeliest token remains.
    top_p: Annotated[Share, AfterValidator(lambda share: share or LEAST_TOP_P)] | None = None
    top_k: Annotated[Limit, AfterValidator(lambda most: max(0, most))] | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5), number] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Factor | None = either(None, "repetition_penalty", "repeat_penalty")
    repeat_last_n: Limit | None = None
    logit_bias: Biases | None = None
    stop: str | Several[str] = ""
    max_tokens: Limit | None = None
    ignore_eos: Boolean = False
    exact: Boolean | None = None
    target_lang: str | None = None
    source_lang: str | None = None
    truncate_prompt_tokens: Count | None = None
    # `false` means no drafts.
    speculative: Boolean | Speculative = True


ConstraintKind = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True)
class TextConstraint:
    """A schema, a regular expression or a grammar that a text has to match. kind: The name of the
    option. field: The field of the body."""

    kind: ConstraintKind
    value: str | Object
    field: str = "response_format"

    @property
    def text(self) -> str:
        """The text of the constraint, which is JSON for a schema."""
        value = self.value
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may or must call.

    Attributes:
        name: The only tool that may be called, which must be called, or "".
        allowed: The names of the tools that it sees, or None for all.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str = ""
    allowed: frozenset[str] | None = None


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call.

    Attributes:
        listed: The tools, in the format of chat templates.
        must: If a call is demanded, the names of the tools that may be called, or else ().
        most_calls: Largest number of calls, or None for any number.
    """

    listed: tuple[Tool, ...] = ()
    must: tuple[str, ...] = ()
    most_calls: int | None = None

    @classmethod
    def of(cls, tools: Iterable[Tool], choice: ToolChoice, parallel: bool | None = None) -> Self:
        """Return the tools of a chat. A later tool replaces a tool of the same name. parallel:
        Whether an answer may have several calls, which is the default. Raises Problem."""
        named = {tool["function"]["name"]: tool for tool in tools}
        demanded = choice.mode == "required"
        if choice.allowed is not None:
            named = {name: tool for name, tool in named.items() if name in choice.allowed}
            if not named:
                raise invalid("tool_choice allows none of the functions in tools", "tool_choice")
        if demanded and not named:
            raise invalid("tool_choice asks for a call: give tools", "tool_choice")
        if choice.name and choice.name not in named:
            message = f"tool_choice names {choice.name:.80}, which is none of the functions"
            raise invalid(message, "tool_choice")
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
        constraints: At most one constraint, or the request is wrong.
        top_logprobs: Number of alternatives of each token, or None for no log-probabilities.
        count: Number of completions of each prompt.
        prediction: A text that the completion may turn out to have.
    """

    sampling: Sampled
    constraints: Sequence[TextConstraint] = ()
    top_logprobs: int | None = None
    count: int = 1
    prediction: str = ""
