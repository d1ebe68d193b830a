"""OpenAI's chat and text completions, with llama.cpp's `timings` and vLLM's figures of drafts, and
OpenAI's embeddings, with the task that computes embeddings for other clients, too."""

import base64
import functools
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field

from ..engine.embeddings import Vector, embed
from ..proposers.lookup import PREDICTION
from ..results import Step, TokenLogprob
from ..text.chat import Ending
from ..text.messages import text_of
from ..text.prompts import prompt_ids
from ..text.vocabulary import token_piece
from .engine import EngineTask
from .events import Event, by_kind
from .fields import Body, Boolean, Fields, Ids, Refused, Several, Written, either, number, parts_of
from .internal import Chat, Count, Limit, Sampled, Wanted
from .problems import invalid, too_long
from .requests import CompletionBody, LoadedModel, Prepared
from .service import FINGERPRINT, LEAST_LOGPROB, Choice, Payload, Writer, post, streamed
from .shared_bodies import ChatMessage, Constrained, Content, Function, ToolChoosing

TopLogprobs = Annotated[int, Field(ge=0, le=20), number]
false_is_unset = BeforeValidator(lambda value: None if value is False else value)
TEXT_FIELDS = {"content": "content", "reasoning": "reasoning_content"}
router = APIRouter()


# Bodies.
Messages = Annotated[Several[ChatMessage], Field(min_length=1)]


class Conversation(Body, ToolChoosing):
    """The fields of a chat that decide its prompt."""

    messages: Messages
    tools: Several[Function] = []  # noqa: RUF012
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None

    def chat(self) -> Chat:
        """Return the conversation. Raises Problem."""
        if self.continue_final_message and self.add_generation_prompt:
            rule = "continue_final_message and add_generation_prompt cannot both be true"
            raise invalid(f"{rule}: set one of them to false", "continue_final_message")
        ending: Ending = "closed" if self.add_generation_prompt is False else "answer"
        ending = "continue" if self.continue_final_message else ending
        messages = [message.message() for message in self.messages]
        return self.chat_of(messages, self.chosen(self.tools), ending)


class StreamOptions(Fields):
    include_usage: Boolean = False
    include_drafted: Boolean = False


class PredictedOutput(Fields):
    type: Literal["content"]
    content: Content


class Completion(CompletionBody, Constrained, Sampled):
    """Fields of chat and text completions."""

    refused: ClassVar[Refused] = {**Sampled.refused, "n_predict": (-1,)}
    max_tokens: Limit | None = either(None, "max_tokens", "max_completion_tokens")
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
    # 0 requests only the logprobs of the tokens themselves.
    logprobs: Annotated[TopLogprobs | None, false_is_unset] = None
    echo: Boolean = False
    suffix: str = ""

    def prepared(self, model: LoadedModel) -> Prepared:
        scored = self.echo and self.logprobs is not None
        if scored and self.suffix:
            rule = "echo with logprobs and suffix cannot be combined"
            raise invalid(f"{rule}: leave one of them out", "echo")
        wanted, prompts = self.wanted(self.logprobs), several(self.prompt)
        return model.texts(prompts, wanted, suffix=self.suffix, scores_prompt=scored)


class EmbeddingsRequest(Body):
    """The body of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None


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

    def __init__(self, model: LoadedModel, body: ChatRequest | TextRequest) -> None:
        super().__init__(model, body)
        self.include_drafted = body.stream_options.include_drafted
        self._include_usage = body.stream_options.include_usage
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": FINGERPRINT,
        }

    def answer(self, choices: Sequence[Choice]) -> Payload:
        listed = [
            self._choice(one, self.content(one), self.logprobs(one, one), _reason(one))
            for one in choices
        ]
        head = {**self._head, "object": self.answer_type, "choices": listed}
        return {**head, **self._figures(choices)}

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> Iterator[Payload]:
        """Yield chunks of text. If include_drafted is set, the first one has token counts."""
        contents = [content for event in events for content in self.contents(event)]
        logprobs, tokens = self.logprobs(choice, step), len(step.tokens)
        if not contents and (logprobs or (self.include_drafted and tokens)):
            contents = [self.nothing]
        for content in contents:
            piece = self._choice(choice, content, logprobs)
            if self.include_drafted:
                piece |= {"drafted": step.accepted > 0, "tokens": tokens}
            yield self._chunk([piece])
            tokens, logprobs = 0, None

    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        last = self._choice(choice, self.nothing, None, _reason(choice))
        return {**self._chunk([last]), **self.timings([choice])}

    def rest(self, choices: Sequence[Choice]) -> bytes:
        usage = {**self._chunk([]), **self._figures(choices)}
        return (self.encoded(usage) if self._include_usage else b"") + b"data: [DONE]\n\n"

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
        return {"usage": usage, **self.timings(choices)}

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
    def contents(self, event: Event) -> list[Payload]:
        """Return the contents of the chunks with an event."""

    @abstractmethod
    def logprobs(self, choice: Choice, of: Choice | Step) -> Payload | None:
        """Return the log-probabilities of a choice, or of a part of it, if there are any."""

    def _entry(self, token: TokenLogprob) -> Payload:
        top = [self._token(*likely) for likely in token.top]
        return {**self._token(token.token, token.logprob), "top_logprobs": top}

    def _token(self, id: int, logprob: float) -> Payload:
        piece = token_piece(self.tokenizer, id)
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
        decode, prompts = self.tokenizer.decode, several(body.prompt) if body.echo else ()
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
        return {"text": "".join([*self._echoed[choice.index :][:1], by_kind(choice.events)[0]])}

    def contents(self, event: Event) -> list[Payload]:
        return [{"text": event.text}]

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
        names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
        listed: dict[str, list[Any]] = {name: [] for name in names}
        for logprob in logprobs:
            token = self._entry(logprob)
            tops = {_key(top): top["logprob"] for top in token["top_logprobs"]}
            listed["tokens"].append(_key(token))
            listed["token_logprobs"].append(token["logprob"])
            listed["top_logprobs"].append(tops)
            listed["text_offset"].append(self._offsets[choice.index])
            if logprob.token not in self.tokenizer.special_ids:
                # A character counts at its first byte.
                begun = sum(byte & 0xC0 != 0x80 for byte in token["bytes"])
                self._offsets[choice.index] += begun
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
        content, reasoning, calls = by_kind(choice.events)
        said = None if calls and not content else content
        message: Payload = {"role": "assistant", "content": said}
        message |= {"refusal": None, "annotations": []}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": [_call(call, call.text) for call in calls]} if calls else {}
        return {"message": message}

    def contents(self, event: Event) -> list[Payload]:
        if event.kind != "call":
            return [{"delta": {TEXT_FIELDS[event.kind]: event.text}}]
        # The arguments of a call follow in a delta of their own.
        arguments = {"index": event.index, "function": {"arguments": event.text}}
        calls: list[Payload] = [{"index": event.index, **_call(event, "")}, arguments]
        return [{"delta": {"tool_calls": [call]}} for call in calls]

    def logprobs(self, choice: Choice, of: Choice | Step) -> Payload | None:
        # OpenAI leaves out the token that ends a text.
        count = len(of.logprobs) - (of.finish_reason == "eos")
        content = [self._entry(token) for token in of.logprobs[:count]]
        return {"content": content, "refusal": None} if content else None


def _call(event: Event, arguments: str) -> Payload:
    function = {"name": event.name, "arguments": arguments}
    return {"id": event.id, "type": "function", "function": function}


def _reason(choice: Choice) -> str:
    ended = "tool_calls" if choice.reader.count else "stop"
    return ended if choice.complete else "length"


def embedded(model: LoadedModel, body: EmbeddingsRequest) -> EngineTask:
    """Return the task of a body. Raises Problem and PromptError."""

    def answer(prompt_tokens: int, vectors: Sequence[Vector]) -> Payload:
        data = []
        for at, vector in enumerate(vectors):
            packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            numbers = packed if body.encoding_format == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": at, "embedding": numbers})
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
        return {"object": "list", "model": model.name, "data": data, "usage": usage}

    return embedding_task(model, several(body.input), answer, dimensions=body.dimensions)


def embedding_task(
    model: LoadedModel,
    inputs: Sequence[str | list[int]],
    answer: Callable[[int, Sequence[Vector]], Payload],
    *,
    dimensions: int | None = None,
    shortens: bool = False,
) -> EngineTask:
    """Return the task of embedding texts.

    Args:
        inputs: The texts, which are in the field `input` of the body.
        answer: Returns the body of the answer for the number of tokens and the vectors.
        dimensions: The width of the vectors that the client expects, or None.
        shortens: Whether the end of a text that does not fit is left out, instead of an error.
    Raises:
        Problem, PromptError: If a text cannot be embedded.
    """
    width = model.pair.target.width
    if dimensions not in (None, width):
        message = f"dimensions must be {width}, the width of this model: leave it out"
        raise invalid(message, "dimensions")
    longest, budget = model.longest, model.budget
    fits = longest if budget is None else budget.longest_prompt(longest)
    advice = "shorten it" if fits == longest else "shorten it, or raise memory-budget"
    texts = []
    for text in inputs:
        if isinstance(text, str):
            text = text[: model.most_characters] if shortens else text
            model.check_characters(text, "input")
            text = prompt_ids(model.pair.tokenizer, text, chat_template=False)
        model.check_ids(text, "input")
        text = text[:fits] if shortens else text
        if len(text) > fits:
            raise too_long("input", len(text), fits, fits, advice)
        texts.append(text)
    count, longest = sum(map(len, texts)), max(map(len, texts), default=0)
    nbytes = budget.alone(longest, 0) if budget is not None and longest else 0
    return EngineTask(embed(model.pair, texts), nbytes, functools.partial(answer, count), count)


# Routes.
post(router, "/chat/completions", ChatRequest, ChatWriter, "Answers messages", streamed(ChatWriter))
post(router, "/completions", TextRequest, TextWriter, "Continues a text", streamed(TextWriter))
post(router, "/embeddings", EmbeddingsRequest, embedded, "Embeds texts")
