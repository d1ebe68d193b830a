"""OpenAI's chat and text completions, with llama.cpp's `timings` and vLLM's figures of drafts."""

import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..proposers.lookup import PREDICTION
from ..results import Step, TokenLogprob
from .answers import FINGERPRINT, LEAST_LOGPROB, Choice, Payload, Writer, token_pieces
from .events import Call, Event, Text, joined
from .openai_bodies import ChatRequest, Completion, TextRequest, prepared_chat, prepared_text
from .problems import Problem
from .registry import ServedModel
from .requests import LoadedModel, Prepared
from .service import Service, complete, service_of

TEXT_FIELDS = {"content": "content", "reasoning": "reasoning_content"}
router = APIRouter()


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

    def __init__(self, model: LoadedModel, body: Completion, prepared: Prepared) -> None:
        super().__init__(model.name, prepared, stream=body.stream)
        self.include_drafted = body.stream_options.include_drafted
        self._include_usage = body.stream_options.include_usage
        self._tokenizer = model.pair.tokenizer
        logprobs = prepared.requests[0].top_logprobs is not None
        self._pieces = token_pieces(self._tokenizer) if logprobs else []
        self._offsets: Counter[int] = Counter()
        self._begun: set[int] = set()
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": FINGERPRINT,
        }

    def answer(self, choices: Sequence[Choice]) -> Payload:
        listed = [
            self._choice(
                choice, self.content(choice), self.logprobs(choice, choice), _reason(choice)
            )
            for choice in choices
        ]
        head = {**self._head, "object": self.answer_type, "choices": listed}
        return {**head, **self._figures(choices)}

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> list[Payload]:
        """Return chunks of text. If include_drafted is set, the first one has token counts."""
        contents, logprobs = self.contents(step, events), self.logprobs(choice, step)
        if logprobs or (self.include_drafted and step.tokens):
            contents = contents or [self.nothing]
        pieces = []
        for at, content in enumerate(contents):
            pieces.append(self._choice(choice, content, None if at else logprobs))
            if self.include_drafted:
                tokens = 0 if at else len(step.tokens)
                pieces[at] |= {"drafted": step.accepted > 0, "tokens": tokens}
        return [self._chunk([piece]) for piece in pieces]

    def end(self, choice: Choice) -> list[Payload]:
        last = self._choice(choice, self.nothing, None, _reason(choice))
        return [{**self._chunk([last]), **timings([choice])}]

    def rest(self, choices: Sequence[Choice]) -> list[Payload]:
        """Return the chunk with the usage, if it was requested."""
        figures = self._include_usage
        return [{**self._chunk([]), **self._figures(choices)}] if figures else []

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
        piece = self._pieces[id] if id < len(self._pieces) else None
        # Logits may be wider than the vocabulary. This is vLLM's name for a token without text.
        token = f"token_id:{id}" if piece is None else piece.decode("utf-8", "replace")
        logprob = max(LEAST_LOGPROB, logprob)
        return {"token": token, "logprob": logprob, "bytes": list(piece or b"")}


class TextWriter(CompletionWriter):
    """/v1/completions."""

    answer_type = chunk_type = "text_completion"
    prefix = "cmpl"
    nothing: ClassVar[Payload] = {"text": ""}

    def start(self, choice: Choice) -> list[Payload]:
        """Return the prompt, if `echo` is set and the prompt has no logprobs."""
        return [] if self._scores_prompt(choice) else self._echo(choice)

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> list[Payload]:
        """Return chunks of text, and before the first one the prompt if it has logprobs."""
        echo: list[Payload] = []
        if self._scores_prompt(choice) and choice.index not in self._begun:
            self._begun.add(choice.index)
            echo = self._echo(choice, self._listed(choice, (), after_prompt=True))
        return [*echo, *super().piece(choice, step, events)]

    def _echo(self, choice: Choice, logprobs: Payload | None = None) -> list[Payload]:
        echoed = self.prepared.echoed[choice.index :][:1]
        return [self._chunk([self._choice(choice, {"text": text}, logprobs)]) for text in echoed]

    def _scores_prompt(self, choice: Choice) -> bool:
        return self.prepared.requests[choice.index].scores_prompt

    def content(self, choice: Choice) -> Payload:
        return {"text": "".join([*self.prepared.echoed[choice.index :][:1], *choice.texts])}

    def contents(self, step: Step, events: Iterable[Event]) -> list[Payload]:
        return [{"text": step.text}] if step.text else []

    def logprobs(self, choice: Choice, of: Choice | Step) -> Payload | None:
        complete = of is choice and self._scores_prompt(choice)
        return self._listed(choice, of.logprobs, after_prompt=complete)

    def _listed(
        self, choice: Choice, logprobs: Sequence[TokenLogprob], *, after_prompt: bool = False
    ) -> Payload | None:
        """Return the lists of the next tokens of a choice, or None if there are none. after_prompt:
        Whether the tokens of the prompt come first."""
        if after_prompt:
            first: Any = self.prepared.requests[choice.index].prompt[0]
            logprobs = [TokenLogprob(first, 0.0, ()), *choice.prompt_logprobs, *logprobs]
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
        likeliest = ([self._token(*top) for top in token.top] for token in logprobs)
        listed: dict[str, list[Any]] = {
            "tokens": [_key(token) for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {_key(one): one["logprob"] for one in tokens_at} for tokens_at in likeliest
            ],
            "text_offset": offsets,
        }
        if after_prompt:
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

    def start(self, choice: Choice) -> list[Payload]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._choice(choice, {"delta": delta})])]

    def content(self, choice: Choice) -> Payload:
        return {"message": _message(choice)}

    def contents(self, step: Step, events: Iterable[Event]) -> list[Payload]:
        return [{"delta": _delta(event)} for event in events]

    def logprobs(self, choice: Choice, of: Choice | Step) -> Payload | None:
        # OpenAI leaves out the token that ends a text.
        count = len(of.logprobs) - (of.finish_reason == "eos")
        content = [
            self._token(token.token, token.logprob)
            | {"top_logprobs": [self._token(*top) for top in token.top]}
            for token in of.logprobs[:count]
        ]
        return {"content": content, "refusal": None} if content else None


def _delta(event: Event) -> Payload:
    """Return the delta of an event."""
    if isinstance(event, Text):
        return {TEXT_FIELDS[event.kind]: event.text}
    call: Payload = {"index": event.index}
    if isinstance(event, Call):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{**call, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{**call, "function": {"arguments": event.text}}]}


def _message(choice: Choice) -> Payload:
    """Return the complete message of a choice, which is the sum of the deltas."""
    message: Payload = {"role": "assistant", "content": "", "refusal": None, "annotations": []}
    calls: list[Payload] = []
    for delta in map(_delta, joined(choice.events)):
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
            elif "id" in value[0]:
                calls.append({key: value[0][key] for key in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] = value[0]["function"]["arguments"]
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _reason(choice: Choice) -> str:
    ended = "tool_calls" if choice.reader.count else "stop"
    return ended if choice.finish_reason in ("eos", "stop") else "length"


def timings(choices: Sequence[Choice]) -> dict[str, Payload]:
    """Return llama.cpp's figures of times and drafts, or {} if every choice was cut."""
    results = [choice.result for choice in choices if choice.result is not None]
    if not results:
        return {}
    prompt_ms = 1000 * max(result.stats.seconds.prompt for result in results)
    predicted_ms = 1000 * max(result.stats.seconds.decoding for result in results)
    cache_n = sum(result.labels.cached_tokens for result in results)
    prompt_n = sum(result.labels.prompt_tokens for result in results) - cache_n
    predicted_n = sum(len(result.tokens) for result in results)
    figures: Payload = {"cache_n": cache_n}
    for name, n, ms in (("prompt", prompt_n, prompt_ms), ("predicted", predicted_n, predicted_ms)):
        figures[f"{name}_n"], figures[f"{name}_ms"] = n, round(ms, 3)
        figures[f"{name}_per_token_ms"] = _ratio(ms, n)
        figures[f"{name}_per_second"] = _ratio(1000 * n, ms)
    if any(result.labels.proposer != "none" for result in results):
        figures["draft_n"] = sum(result.stats.drafted for result in results)
        figures["draft_n_accepted"] = sum(result.stats.accepted for result in results)
    return {"timings": figures}


def _ratio(part: float, total: float) -> float:
    return round(part / total, 3) if total else 0.0


def error(problem: Problem) -> tuple[int, Payload]:
    """Return the status and the payload of an error."""
    return problem.status, problem.as_dict()


# Routes.
@router.post("/chat/completions", summary="Answers messages")
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """Answer the messages of a conversation."""
    return await complete(
        http, body, lambda model, body: ChatWriter(model, body, prepared_chat(model, body))
    )


@router.post("/completions", summary="Continues a text")
async def completions(body: TextRequest, http: Request) -> Response:
    """Continue texts."""
    return await complete(
        http, body, lambda model, body: TextWriter(model, body, prepared_text(model, body))
    )


@router.get("/models", summary="The models and their states")
async def models(http: Request) -> Payload:
    """List all models: in `data` for OpenAI's and Anthropic's clients, in `models` for Codex."""
    service = service_of(http)
    service.registry.refresh()
    listed = [_described(service, model) for model in service.registry.models]
    first, last = listed[0]["id"], listed[-1]["id"]
    answer = {"object": "list", "data": listed, "models": [_for_codex(model) for model in listed]}
    return {**answer, "first_id": first, "last_id": last, "has_more": False}


@router.get("/models/{id:path}", summary="One model")
async def model(id: str, http: Request) -> Payload:
    """Describe a model by one of its names."""
    service = service_of(http)
    service.registry.refresh()
    return _described(service, service.registry.named(id))


def _for_codex(model: Payload) -> Payload:
    """Return the fields of a model for Codex, which drops a model that lacks one of them. Source:
    ollama/ollama, cmd/launch/codex.go."""
    return {
        **dict.fromkeys(("slug", "display_name", "description"), model["id"]),
        **dict.fromkeys(("supported_reasoning_levels", "experimental_supported_tools"), ()),
        **dict.fromkeys(("support_verbosity", "supports_reasoning_summaries"), False),
        "context_window": model.get("context_length"),
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "supports_parallel_tool_calls": False,
        "priority": 0,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "input_modalities": ["text"],
        "base_instructions": "",
        "default_verbosity": "low",
    }


def _described(service: Service, of: ServedModel) -> Payload:
    model: Payload = {"id": of.name, "object": "model", "created": service.created}
    model |= {"owned_by": "mlx-specdec", "type": "model", "display_name": of.name}
    # llama.cpp's names of the state and the size.
    model |= {"status": {"value": of.state}, "meta": {"size": of.nbytes or None}}
    if of.facts is None:
        return model
    # vLLM, OpenRouter and llama.cpp have different names for the context length.
    longest = of.facts.longest
    model["meta"]["n_ctx_train"] = longest
    return {**model, **dict.fromkeys(("max_model_len", "context_length"), longest)}
