"""OpenAI's chat and text completions, with llama.cpp's `timings` and vLLM's figures of drafts."""

import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from ..proposers.lookup import PREDICTION
from ..results import Step, TokenLogprob
from ..text.chat import Ending
from ..text.messages import text_of
from .answers import FINGERPRINT, LEAST_LOGPROB, Choice, Payload, Writer, timings, token_piece
from .events import Event, joined
from .fields import Body, Boolean, Fields, Ids, Refused, Several, either, number
from .internal import Chat, Count, Limit, Sampled, Tools, Wanted
from .problems import invalid
from .requests import LoadedModel, Prepared
from .service import complete
from .shared_bodies import (
    ChatMessage,
    Choosing,
    Constrained,
    Content,
    OneOf,
    Thoughtful,
    ToolList,
    Written,
    choice_of,
    parts_of,
)

TOP_LOGPROBS = 20
TopLogprobs = Annotated[int, Field(ge=0, le=TOP_LOGPROBS), number]
TEXT_FIELDS = {"content": "content", "reasoning": "reasoning_content"}
router = APIRouter()


# Bodies.
class ChatChoosing(Choosing):
    type: Literal["function", "allowed_tools"] = "function"


Messages = Annotated[Several[ChatMessage], Field(min_length=1)]


class Conversation(Body, Thoughtful):
    """The fields of a chat that decide its prompt."""

    messages: Messages
    tools: ToolList = []  # noqa: RUF012
    tool_choice: ChatChoosing | OneOf | None = None
    parallel_tool_calls: Boolean | None = None
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None

    def chat(self) -> Chat:
        """Return the conversation. Raises Problem."""
        empty = [message.role for message in self.messages if message.content is None]
        if any(role != "assistant" for role in empty):
            message = "all messages but those of the assistant must have a content"
            raise invalid(message, "messages")
        ending: Ending = "closed" if self.add_generation_prompt is False else "answer"
        if self.continue_final_message:
            ending = "continue"
            if self.add_generation_prompt:
                rule = "continue_final_message and add_generation_prompt cannot both be true"
                raise invalid(f"{rule}: set one of them to false", "continue_final_message")
        tools = [function.tool for function in self.tools]
        return Chat(
            [message.message() for message in self.messages],
            Tools.of(tools, choice_of(self.tool_choice), self.parallel_tool_calls),
            self.variables(),
            self.thinking_budget(),
            ending,
        )


class StreamOptions(Fields):
    include_usage: Boolean = False
    include_drafted: Boolean = False


class PredictedOutput(Fields):
    type: Literal["content"]
    content: Content


class Completion(Body, Constrained, Sampled):
    """Fields of chat and text completions."""

    refused: ClassVar[Refused] = {**Sampled.refused, "n_predict": (-1,)}
    max_tokens: Limit | None = either(None, "max_tokens", "max_completion_tokens")
    stream: Boolean | None = None
    stream_options: StreamOptions = StreamOptions()
    n: Count | None = None
    best_of: Count | None = None
    prediction: PredictedOutput | None = None

    def wanted(self, top_logprobs: int | None) -> Wanted:
        """Return the wishes of the client, except for the prompt. Raises Problem."""
        if self.best_of not in (None, 1, self.n or 1):
            message = "best_of must be n or 1: this server does not choose between texts"
            raise invalid(message, "best_of")
        predicted = "" if self.prediction is None else text_of(parts_of(self.prediction.content))
        return Wanted(self, self.constraints(), top_logprobs, self.n or 1, predicted)


class ChatRequest(Completion, Conversation):
    """The body of /v1/chat/completions."""

    logprobs: Boolean | None = None
    top_logprobs: TopLogprobs | None = None

    def prepared(self, model: LoadedModel) -> Prepared:
        """Prepare a chat completion. Raises Problem and SpecdecError."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        top = (self.top_logprobs or 0) if self.logprobs else None
        return model.chat(self.chat(), self.wanted(top))


Prompt = (
    Written
    | Annotated[Ids, Field(min_length=1)]
    | Annotated[Several[Written], Field(min_length=1)]
    | Annotated[Several[Annotated[Ids, Field(min_length=1)]], Field(min_length=1)]
)
"""A text, token ids, or a list of either."""


def several(texts: Any) -> Sequence[str | list[int]]:
    """Return the texts of a Prompt."""
    single = isinstance(texts, str) or isinstance(texts[0], int)
    return [texts] if single else texts


class TextRequest(Completion):
    """The body of /v1/completions."""

    refused: ClassVar[Refused] = {
        **Completion.refused,
        "add_special_tokens": (True,),
        "tools": ([],),
    }
    prompt: Prompt
    # False requests no logprobs, and 0 only the logprobs of the tokens themselves.
    logprobs: TopLogprobs | Literal[False] = False
    echo: Boolean = False
    suffix: str = ""

    def prepared(self, model: LoadedModel) -> Prepared:
        """Prepare text completions. Raises Problem and SpecdecError."""
        top = None if self.logprobs is False else self.logprobs
        scored = self.echo and top is not None
        if scored and self.suffix:
            rule = "echo with logprobs and suffix cannot be combined"
            raise invalid(f"{rule}: leave one of them out", "echo")
        wanted, prompts = self.wanted(top), several(self.prompt)
        return model.texts(prompts, wanted, suffix=self.suffix, scores_prompt=scored)


# Answers.
class CompletionWriter(Writer):
    """The common base of chat and text completions.

    Attributes:
        answer_type: The field "object" of a complete answer.
        chunk_type: The field "object" of a chunk.
        nothing: The content of a chunk without text.
    """

    answer_type = ""
    chunk_type = ""
    prefix = ""
    nothing: ClassVar[Payload] = {}
    done = b"data: [DONE]\n\n"

    def __init__(self, model: LoadedModel, body: ChatRequest | TextRequest) -> None:
        super().__init__(model.name, body.prepared(model), stream=body.stream)
        self.include_drafted = body.stream_options.include_drafted
        self._include_usage = body.stream_options.include_usage
        self._tokenizer = model.pair.tokenizer
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": FINGERPRINT,
        }

    def answer(self, choices: Sequence[Choice]) -> Payload:
        listed = []
        for choice in choices:
            content, logprobs = self.content(choice), self.logprobs(choice, choice)
            listed.append(self._choice(choice, content, logprobs, _reason(choice)))
        head = {**self._head, "object": self.answer_type, "choices": listed}
        return {**head, **self._figures(choices)}

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> Iterator[Payload]:
        """Yield chunks of text. If include_drafted is set, the first one has token counts."""
        contents, logprobs = self.contents(step, events), self.logprobs(choice, step)
        tokens = len(step.tokens)
        if not contents and (logprobs or (self.include_drafted and tokens)):
            contents = [self.nothing]
        for content in contents:
            piece = self._choice(choice, content, logprobs)
            if self.include_drafted:
                piece |= {"drafted": step.accepted > 0, "tokens": tokens}
            yield self._chunk([piece])
            tokens, logprobs = 0, None

    def end(self, choice: Choice) -> Iterator[Payload]:
        last = self._choice(choice, self.nothing, None, _reason(choice))
        yield {**self._chunk([last]), **timings([choice])}

    def rest(self, choices: Sequence[Choice]) -> Iterator[Payload]:
        """Yield the chunk with the usage, if it was requested."""
        if self._include_usage:
            yield {**self._chunk([]), **self._figures(choices)}

    def _figures(self, choices: Sequence[Choice]) -> Payload:
        prompt_tokens = self.prepared.prompt_tokens
        generated = sum(choice.tokens for choice in choices)
        sources = [choice.result.stats.by_source for choice in choices if choice.result is not None]
        predicted = [source[PREDICTION] for source in sources if PREDICTION in source]
        drafted = sum(source.drafted for source in predicted)
        accepted = sum(source.accepted for source in predicted)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens(choices)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }
        return {"usage": usage, **timings(choices)}

    def _chunk(self, choices: list[Payload]) -> Payload:
        chunk = {**self._head, "object": self.chunk_type, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _choice(
        self, of: Choice, content: Payload, logprobs: Payload | None = None, end: str | None = None
    ) -> Payload:
        return {"index": of.index, **content, "logprobs": logprobs, "finish_reason": end}

    @abstractmethod
    def content(self, choice: Choice) -> Payload:
        """Return the content of a complete choice."""

    @abstractmethod
    def contents(self, step: Step, events: Iterable[Event]) -> list[Payload]:
        """Return the contents of the chunks of one step."""

    @abstractmethod
    def logprobs(self, choice: Choice, of: Choice | Step) -> Payload | None:
        """Return the log-probabilities of a choice, or of a part of it, if there are any."""

    def _token(self, id: int, logprob: float) -> Payload:
        piece = token_piece(self._tokenizer, id)
        # Logits may be wider than the vocabulary. This is vLLM's name for a token without text.
        token = f"token_id:{id}" if piece is None else piece.decode("utf-8", "replace")
        logprob = max(LEAST_LOGPROB, logprob)
        return {"token": token, "logprob": logprob, "bytes": list(piece or b"")}


class TextWriter(CompletionWriter):
    """/v1/completions."""

    answer_type = chunk_type = "text_completion"
    prefix = "cmpl"
    nothing: ClassVar[Payload] = {"text": ""}

    def __init__(self, model: LoadedModel, body: TextRequest) -> None:
        super().__init__(model, body)
        decode, prompts = self._tokenizer.decode, several(body.prompt) if body.echo else ()
        texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
        self._echoed = [text for text in texts for _ in range(body.n or 1)]
        # The number of characters of each choice so far.
        self._offsets: Counter[int] = Counter()

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> Iterator[Payload]:
        """Yield chunks of text, and before the first one the prompt if `echo` is set."""
        if self._echoed and choice.index not in self._offsets:
            self._offsets[choice.index] = 0
            logprobs = self._listed(choice, step.prompt_logprobs, of_prompt=True)
            text = {"text": self._echoed[choice.index]}
            yield self._chunk([self._choice(choice, text, logprobs)])
        yield from super().piece(choice, step, events)

    def content(self, choice: Choice) -> Payload:
        return {"text": "".join([*self._echoed[choice.index :][:1], *choice.texts])}

    def contents(self, step: Step, events: Iterable[Event]) -> list[Payload]:
        return [{"text": step.text}] if step.text else []

    def logprobs(self, choice: Choice, of: Choice | Step) -> Payload | None:
        return self._listed(choice, of.logprobs, of_prompt=of is choice)

    def _listed(
        self, choice: Choice, logprobs: Sequence[TokenLogprob], *, of_prompt: bool
    ) -> Payload | None:
        """Return the lists of the next tokens of a choice, or None if there are none. of_prompt:
        Whether the tokens of the prompt come first, if they have log-probabilities."""
        request = self.prepared.requests[choice.index]
        scored = of_prompt and request.scores_prompt
        if scored:
            first: Any = request.prompt[0]
            logprobs = [TokenLogprob(first, 0.0, ()), *logprobs]
        if not logprobs:
            return None
        tokens = [self._token(token.token, token.logprob) for token in logprobs]
        offsets = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            offsets.append(self._offsets[choice.index])
            if logprob.token not in self._tokenizer.special_ids:
                # A character counts at its first byte.
                begun = sum(byte & 0xC0 != 0x80 for byte in token["bytes"])
                self._offsets[choice.index] += begun
        likeliest = [[self._token(*top) for top in token.top] for token in logprobs]
        listed: dict[str, list[Any]] = {
            "tokens": [_key(token) for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{_key(top): top["logprob"] for top in tops} for tops in likeliest],
            "text_offset": offsets,
        }
        if scored:
            # Nothing predicts the first token.
            listed["token_logprobs"][0] = listed["top_logprobs"][0] = None
        return listed


def _key(token: Payload) -> str:
    """Return a unique key of a token. Parts of characters look alike, so their bytes are used."""
    if "\ufffd" in token["token"]:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes(token["bytes"]))
    return str(token["token"])


class ChatWriter(CompletionWriter):
    """/v1/chat/completions."""

    answer_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    prefix = "chatcmpl"
    nothing: ClassVar[Payload] = {"delta": {}}

    def start(self, choice: Choice) -> Iterator[Payload]:
        delta = {"role": "assistant", "content": ""}
        yield self._chunk([self._choice(choice, {"delta": delta})])

    def content(self, choice: Choice) -> Payload:
        return {"message": _message(choice)}

    def contents(self, step: Step, events: Iterable[Event]) -> list[Payload]:
        return [{"delta": delta} for event in events for delta in _deltas(event)]

    def logprobs(self, choice: Choice, of: Choice | Step) -> Payload | None:
        # OpenAI leaves out the token that ends a text.
        count = len(of.logprobs) - (of.finish_reason == "eos")
        content = [
            self._token(token.token, token.logprob)
            | {"top_logprobs": [self._token(*top) for top in token.top]}
            for token in of.logprobs[:count]
        ]
        return {"content": content, "refusal": None} if content else None


def _call(event: Event, arguments: str) -> Payload:
    function = {"name": event.name, "arguments": arguments}
    return {"id": event.id, "type": "function", "function": function}


def _deltas(event: Event) -> list[Payload]:
    """Return the deltas of an event. The arguments of a call follow in a delta of their own."""
    if event.kind != "call":
        return [{TEXT_FIELDS[event.kind]: event.text}]
    arguments = {"index": event.index, "function": {"arguments": event.text}}
    calls: list[Payload] = [{"index": event.index, **_call(event, "")}, arguments]
    return [{"tool_calls": [call]} for call in calls]


def _message(choice: Choice) -> Payload:
    """Return the complete message of a choice."""
    message: Payload = {"role": "assistant", "content": "", "refusal": None, "annotations": []}
    calls = []
    for event in joined(choice.events):
        if event.kind == "call":
            calls.append(_call(event, event.text))
        else:
            name = TEXT_FIELDS[event.kind]
            message[name] = message.get(name, "") + event.text
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _reason(choice: Choice) -> str:
    ended = "tool_calls" if choice.reader.count else "stop"
    return ended if choice.complete else "length"


# Routes.
@router.post("/chat/completions", summary="Answers messages")
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """Answer the messages of a conversation."""
    return await complete(http, body, ChatWriter)


@router.post("/completions", summary="Continues a text")
async def completions(body: TextRequest, http: Request) -> Response:
    """Continue texts."""
    return await complete(http, body, TextWriter)
