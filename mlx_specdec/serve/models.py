"""Models of the bodies of chat and text completions, and models that other wire formats share."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, StrictInt, Tag, model_validator

from ..core.options import (
    LARGEST_BIAS,
    LEAST_TOP_P,
    MOST_DRAFTED,
    REPETITION_PENALTIES,
    TEMPERATURE_LIMITS,
)
from ..text.chat import RESERVED
from .bodies import (
    Boolean,
    ByType,
    Fields,
    Number,
    Object,
    String,
    broken,
    integral,
    worded,
    zero_or,
)
from .contents import Content, Reasoned
from .settings import Limits

UNNAMED = ("", "default_model", "dummy", "tgi")
"""Names that clients of mlx_lm.server and of Hugging Face's servers send if no model is named."""
TOP_LOGPROBS = 20
LONGEST_TOOL_NAME = 128
"""Largest number of characters of a tool's name, as in Anthropic's API. OpenAI's takes 64."""


# Types of several fields.
Written = Annotated[String, Field(pattern=r"\S"), worded("a non-blank string")]
Name = Annotated[
    String,
    Field(pattern=f"^[A-Za-z0-9_.-]{{1,{LONGEST_TOOL_NAME}}}$"),
    worded(f"a name of at most {LONGEST_TOOL_NAME} letters, digits, underscores, dots and dashes"),
]
JsonSchema = Annotated[Object, worded("a JSON schema, an object")]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
MaxTokens = Annotated[
    StrictInt,
    Field(ge=-1),
    integral,
    worded("a whole number from 0 on, or -1 for no limit", inside=True),
]
Count = Annotated[StrictInt, Field(ge=1), integral]
TopLogprobs = Annotated[StrictInt, Field(ge=0, le=TOP_LOGPROBS), integral]
Repetition = Annotated[Number, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])]
Penalty = Annotated[Number, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
Stop = Annotated[String, Field(max_length=Limits.stop_length)]
Stops = Annotated[list[Stop], Field(max_length=Limits.stops)]
OneOf = Literal["none", "auto", "required"]


Budget = Annotated[StrictInt, Field(ge=0), integral]


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class Reasoning(Fields):
    effort: String | None = None
    max_tokens: Budget | None = None


class Parameters(Fields):
    """The JSON schema of the arguments of a function."""

    properties: dict[str, Object | Boolean] | None = None
    required: list[String] | None = None


class Function(Fields):
    name: Name
    description: String | None = None
    parameters: Parameters | None = None


class ChatTool(Fields):
    type: Literal["function"] | None = None
    function: Function


ToolList = Annotated[list[ChatTool], Field(max_length=Limits.tools)]


class CalledFunction(Fields):
    name: String
    arguments: String | Object | None = None


class EarlierCall(Fields):
    """A call in an earlier message."""

    function: CalledFunction


class Named(Fields):
    name: String


class FunctionChoice(Fields):
    type: Literal["function"]
    function: Named


class Allowed(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class AllowedChoice(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class ChatMessage(Reasoned):
    role: Role
    content: Content | None = None
    name: String | None = None
    tool_call_id: String | None = None
    refusal: String | None = None
    tool_calls: list[EarlierCall] | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role != "assistant" and self.content is None:
            rule = "all messages but those of the assistant must have a content"
            raise broken(rule, "messages")
        return self


Messages = Annotated[
    list[ChatMessage],
    Field(
        min_length=1,
        description='a non-empty list, each entry of which is {"role": ..., "content": ...}',
    ),
]


class TemplateVariables(Fields):
    refused: ClassVar[Mapping[str, Sequence[object]]] = dict.fromkeys(sorted(RESERVED), ())


class Templated(Fields):
    """Fields of a chat that decide its prompt."""

    messages: Messages | None = None
    chat_template_kwargs: TemplateVariables | None = None
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: String | None = None
    enable_thinking: Boolean | None = None
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            rule = "continue_final_message and add_generation_prompt cannot both be true"
            raise broken(f"{rule}: set one of them to false", "continue_final_message")
        return self


# Constraints.
unset = BeforeValidator(lambda value: None if value == "" else value)
"""An annotation for optional fields of which clients send "" if they do not set them."""
Unset = Annotated[Written | None, unset]
Choices = Annotated[
    list[String],
    Field(min_length=1),
    worded("a non-empty list, each entry of which is a string", inside=True),
]


class TextFormat(Fields):
    type: Literal["text"]


class ObjectFormat(Fields):
    type: Literal["json_object"]
    # Named as in llama.cpp and as in TGI.
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    value: JsonSchema | None = None


class InnerSchema(Fields):
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class OpenAIFormat(Fields):
    type: Literal["json_schema"]
    json_schema: InnerSchema


class SchemaFormat(InnerSchema):
    """The format of Anthropic's API and of llama.cpp."""

    type: Literal["json_schema"]


class _FormatByType(ByType):
    def choose(self, value: Any) -> str | None:
        chosen = super().choose(value)
        nested = chosen == "<json_schema>" and value.get("json_schema") is not None
        return "< nested>" if nested else chosen


RESPONSE_FORMAT = _FormatByType(
    *(TextFormat, ObjectFormat, SchemaFormat),
    nested=OpenAIFormat,
    words='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
    '{"schema": {...}}}',
)


class StructuredOutputs(Fields):
    closed: ClassVar[bool] = True
    json_: Annotated[Written | JsonSchema | None, unset, Field(alias="json")] = None
    regex: Unset = None
    grammar: Unset = None
    choice: Choices | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = (self.json_, self.regex, self.grammar, self.choice)
        if sum(kind is not None for kind in kinds) != 1:
            field = "structured_outputs"
            rule = f"{field} must have exactly one of json, regex, grammar and choice"
            raise broken(rule, field)
        return self


class Constrained(Fields):
    """The fields with constraints. A body may have only one of them."""

    response_format: Annotated[Any, RESPONSE_FORMAT] | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: Unset = None
    grammar: Unset = None
    guided_json: Annotated[Written | JsonSchema | None, unset] = None
    guided_regex: Unset = None
    guided_grammar: Unset = None
    guided_choice: Choices | None = None

    def constraints(self) -> list[str]:
        """Return the names of the fields that contain a constraint."""
        names = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        return [
            name
            for name in names
            if name != "response_format" or not isinstance(self.response_format, TextFormat)
        ]


CONSTRAINTS = tuple(Constrained.model_fields)


# Sampling and generation.
class Sampled(Fields):
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1), integral] | None = None
    temperature: (
        Annotated[Number, Field(ge=0, le=TEMPERATURE_LIMITS[1]), zero_or(*TEMPERATURE_LIMITS)]
        | None
    ) = None
    top_p: Annotated[Number, Field(ge=0, le=1), zero_or(LEAST_TOP_P, 1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1), integral] | None = None


class Speculative(Fields):
    closed: ClassVar[bool] = True
    max: Annotated[StrictInt, Field(ge=0, le=MOST_DRAFTED), integral] | None = None


class Generated(Sampled):
    """Fields of all requests for completions."""

    model: String | None = None
    stream: Boolean | None = None
    max_tokens: MaxTokens | None = None
    exact: Boolean | None = None
    speculative: (
        Annotated[
            Boolean | Speculative,
            worded(f'true, false, or {{"max": 4}} with at most {MOST_DRAFTED}'),
        ]
        | None
    ) = None


class StreamOptions(Fields):
    include_usage: Boolean | None = None
    include_drafted: Boolean | None = None


class PredictedOutput(Fields):
    type: Literal["content"]
    content: Content


TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
# There is no lower limit: a very low bias excludes a token.
Biases = Annotated[
    dict[TokenId, Annotated[Number, Field(le=LARGEST_BIAS)]],
    Field(max_length=Limits.biases),
    worded(f'at most {Limits.biases} token ids with numbers, as in {{"42": -5}}', inside=True),
]


class Completion(Generated, Constrained):
    """Fields of chat and text completions."""

    same: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "repeat_penalty": "repetition_penalty",
    }
    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **dict.fromkeys(("adapters", "allowed_token_ids", "audio", "chat_template"), ()),
        **dict.fromkeys(("frequency_context_size", "presence_context_size"), ()),
        **dict.fromkeys(("json_schema", "repetition_context_size", "role_mapping"), ()),
        **dict.fromkeys(("bad_words", "documents", "stop_token_ids"), ([],)),
        **dict.fromkeys(("dry_multiplier", "dynatemp_range", "min_tokens", "mirostat"), (0,)),
        **dict.fromkeys(("include_stop_str_in_output", "use_beam_search"), (False,)),
        "modalities": (["text"],),
        "n_predict": (-1,),
        "skip_special_tokens": (True,),
        "typical_p": (1,),
        "web_search_options": (),
    }
    n: Count | None = None
    best_of: Count | None = None
    stop: Stop | Stops | None = None
    logit_bias: Biases | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: MaxTokens | None = None
    ignore_eos: Boolean | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    repeat_last_n: Annotated[StrictInt, Field(ge=-1), integral] | None = None
    xtc_probability: Annotated[Number, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[Number, Field(ge=0, le=0.5)] | None = None
    prediction: PredictedOutput | None = None
    truncate_prompt_tokens: Count | None = None
    target_lang: String | None = None
    source_lang: String | None = None

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        constraints = self.constraints()
        if len(constraints) > 1:
            names = ", ".join(CONSTRAINTS)
            rule = f"at most one of {names} may be given: leave the others out"
            raise broken(rule, "response_format")
        if constraints and self.ignore_eos:
            rule = "ignore_eos cannot be combined with a format or grammar, which ends the text"
            raise broken(rule, "ignore_eos")
        return self


TOOL_CHOICE = ByType(
    *(FunctionChoice, AllowedChoice),
    word=OneOf,
    words='"none", "auto", "required", or a function such as {"type": "function", "function": '
    '{"name": ...}}',
)


class ChatRequest(Completion, Templated):
    """The body of /v1/chat/completions."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {**Completion.refused, "suffix": ("",)}
    messages: Messages
    logprobs: Boolean | None = None
    top_logprobs: TopLogprobs | None = None
    tools: ToolList | None = None
    tool_choice: Annotated[Any, TOOL_CHOICE] | None = None
    parallel_tool_calls: Boolean | None = None
    functions: Annotated[list[Function], Field(max_length=Limits.tools)] | None = None
    function_call: Literal["none", "auto"] | Named | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise broken("top_logprobs needs logprobs to be true", "top_logprobs")
        for name, listed in (("tool_choice", "tools"), ("function_call", "functions")):
            asks = getattr(self, name) not in (None, "none", "auto")
            if asks and (not getattr(self, listed) or self.constraints()):
                wanted = f"give {listed}, and no format or grammar for the text"
                raise broken(f"{name} asks for a call: {wanted}", name)
        return self


def _prompt(value: Any) -> str:
    """Return the key of a prompt's type: a text, token ids, or a list of either."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    if isinstance(first, str):
        return "<texts>"
    return "<lists>" if isinstance(first, list) else "<ids>"


Ids = Annotated[list[StrictInt], Field(min_length=1)]
Prompt = Annotated[
    Annotated[Written, Tag("<text>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[list[Written], Tag("<texts>")]
    | Annotated[list[Ids], Tag("<lists>")],
    Discriminator(_prompt),
]


class TextRequest(Completion):
    """The body of /v1/completions."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **Completion.refused,
        **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True,)),
        **dict.fromkeys(("tools", "functions"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        "continue_final_message": (False,),
    }
    prompt: Annotated[
        Prompt, Field(description="a string, a list of token ids, or a list of either")
    ]
    logprobs: TopLogprobs | Literal[False] | None = None
    echo: Boolean | None = None
    suffix: String | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        # A value of 0 requests only the logprobs of the tokens themselves.
        if self.echo and self.suffix and self.logprobs is not None and self.logprobs is not False:
            rule = "echo with logprobs and suffix cannot be combined"
            raise broken(f"{rule}: leave one of them out", "echo")
        return self
