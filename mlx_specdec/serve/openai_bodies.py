"""Bodies of OpenAI's chat and text completions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Discriminator, Field, StrictInt, Tag, model_validator

from ..text.messages import Message, text_of
from .fields import MESSAGES, Body, Boolean, ByType, Fields, Several, String, broken, integral
from .internal import (
    TOOLS,
    Chat,
    Count,
    Function,
    MaxTokens,
    Sampled,
    ToolChoice,
    Tools,
    Wanted,
    choice_of,
)
from .requests import LoadedModel, Prepared
from .shared_bodies import (
    CalledFunction,
    Constrained,
    Content,
    EarlierCall,
    OneOf,
    Reasoned,
    Thoughtful,
    Written,
    parts_of,
)

TOP_LOGPROBS = 20
TopLogprobs = Annotated[StrictInt, Field(ge=0, le=TOP_LOGPROBS), integral]


class ChatTool(Fields):
    type: Literal["function"] | None = None
    function: Function


ToolList = Annotated[Several[ChatTool], Field(max_length=TOOLS)]


class Named(Fields):
    name: String

    def choice(self) -> ToolChoice:
        """Return the choice."""
        return ToolChoice("required", self.name)


class FunctionChoice(Fields):
    type: Literal["function"]
    function: Named

    def choice(self) -> ToolChoice:
        """Return the choice."""
        return self.function.choice()


class Allowed(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[Several[FunctionChoice], Field(min_length=1)]


class AllowedChoice(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed

    def choice(self) -> ToolChoice:
        """Return the choice."""
        allowed = self.allowed_tools
        names = frozenset(tool.function.name for tool in allowed.tools)
        return ToolChoice(allowed.mode, allowed=names)


Choosing = Annotated[
    FunctionChoice | AllowedChoice | OneOf,
    ByType(
        '"none", "auto", "required", or a function such as {"type": "function", "function": '
        '{"name": ...}}'
    ),
]


class ChatMessage(Reasoned):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: String | None = None
    tool_call_id: String | None = None
    refusal: String | None = None
    tool_calls: Several[EarlierCall] | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role != "assistant" and self.content is None:
            rule = "all messages but those of the assistant must have a content"
            raise broken(rule, "messages")
        return self


Messages = Annotated[Several[ChatMessage], Field(min_length=1, max_length=MESSAGES)]


class Conversation(Body, Thoughtful):
    """The fields of a chat that decide its prompt."""

    messages: Messages
    tools: ToolList | None = None
    tool_choice: Choosing | None = None
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            rule = "continue_final_message and add_generation_prompt cannot both be true"
            raise broken(f"{rule}: set one of them to false", "continue_final_message")
        return self

    def chat(self) -> Chat:
        """Return the conversation. Raises Problem."""
        return Chat(
            self.sent(),
            self.called(),
            self.variables(),
            self.thinking_budget(),
            "continue"
            if self.continue_final_message
            else "closed"
            if self.add_generation_prompt is False
            else "answer",
        )

    def sent(self) -> list[Message]:
        """Return the messages as `text.messages` reads them."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def called(self) -> Tools:
        """Return the tools that the model may call. Raises Problem."""
        functions = [tool.function for tool in self.tools or ()]
        return Tools.of(functions, choice_of(self.tool_choice))


class StreamOptions(Fields):
    include_usage: Boolean = False
    include_drafted: Boolean = False


class PredictedOutput(Fields):
    type: Literal["content"]
    content: Content


class Completion(Body, Constrained, Sampled):
    """Fields of chat and text completions."""

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
    max_tokens: MaxTokens | None = Field(
        None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    stream: Boolean | None = None
    stream_options: StreamOptions = StreamOptions()
    n: Count | None = None
    best_of: Count | None = None
    prediction: PredictedOutput | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, 1, self.n or 1):
            message = "best_of must be n or 1: this server does not choose between texts"
            raise broken(message, "best_of")
        return self

    def wanted(self, top_logprobs: int | None) -> Wanted:
        """Return the wishes of the client, except for the prompt."""
        predicted = "" if self.prediction is None else text_of(parts_of(self.prediction.content))
        constraint = next(iter(self.constraints()), None)
        return Wanted(self, constraint, top_logprobs, self.n or 1, predicted)


class ChatRequest(Completion, Conversation):
    """The body of /v1/chat/completions."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {**Completion.refused, "suffix": ("",)}
    logprobs: Boolean | None = None
    top_logprobs: TopLogprobs | None = None
    parallel_tool_calls: Boolean | None = None
    functions: Annotated[Several[Function], Field(max_length=TOOLS)] | None = None
    function_call: OneOf | Named | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise broken("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    def called(self) -> Tools:
        """Return the tools that the model may call, also the older functions. Raises Problem."""
        functions = [tool.function for tool in self.tools or ()] or self.functions or ()
        choice = choice_of(self.tool_choice)
        if self.tool_choice is None:
            choice = replace(choice_of(self.function_call), field="function_call")
        return Tools.of(functions, choice, self.parallel_tool_calls)


def prepared_chat(model: LoadedModel, body: ChatRequest) -> Prepared:
    """Prepare a chat completion. Raises Problem and SpecdecError."""
    top = (body.top_logprobs or 0) if body.logprobs else None
    return model.chat(body.chat(), body.wanted(top))


def _kind(value: Any) -> str:
    """Return the key of a prompt's type: a text, token ids, or a list of either."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    if isinstance(first, str):
        return "<texts>"
    return "<lists>" if isinstance(first, list) else "<ids>"


INPUTS = 2048
"""Largest number of texts in a list of prompts."""
Ids = Annotated[Several[StrictInt], Field(min_length=1)]
Prompt = Annotated[
    Annotated[Written, Tag("<text>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[Several[Written], Field(max_length=INPUTS), Tag("<texts>")]
    | Annotated[Several[Ids], Field(max_length=INPUTS), Tag("<lists>")],
    Discriminator(_kind),
]


def several(texts: Any) -> Sequence[str | list[int]]:
    """Return the texts of a Prompt, which is a text, token ids, or a list of either."""
    single = isinstance(texts, str) or isinstance(texts[0], int)
    return [texts] if single else texts


class TextRequest(Completion):
    """The body of /v1/completions."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **Completion.refused,
        **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True,)),
        **dict.fromkeys(("tools", "functions"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        "continue_final_message": (False,),
    }
    prompt: Prompt
    # False requests no logprobs, and 0 only the logprobs of the tokens themselves.
    logprobs: TopLogprobs | Literal[False] = False
    echo: Boolean = False
    suffix: String = ""

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.suffix and self.logprobs is not False:
            rule = "echo with logprobs and suffix cannot be combined"
            raise broken(f"{rule}: leave one of them out", "echo")
        return self


def prepared_text(model: LoadedModel, body: TextRequest) -> Prepared:
    """Prepare text completions. Raises Problem and SpecdecError."""
    wanted = body.wanted(None if body.logprobs is False else body.logprobs)
    return model.texts(several(body.prompt), wanted, suffix=body.suffix, echo=body.echo)
