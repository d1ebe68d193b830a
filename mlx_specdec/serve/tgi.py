"""The API of Hugging Face's text-generation-inference. Unlike in TGI, completions never include the
stop string."""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from ..results import Step, TokenLogprob
from ..text.vocabulary import token_piece
from ..version import __version__
from .engine import CONNECTIONS
from .events import Event, by_kind
from .fields import Boolean, Fields, Object, Refused, Written
from .internal import ConstraintKind, Count, Limit, Sampled, TextConstraint, Wanted
from .problems import Problem, invalid
from .requests import CompletionBody, LoadedModel, Prepared
from .service import LEAST_LOGPROB, Choice, Payload, Writer, loaded_of, post, respond, streamed

TGI_REASONS = {"eos": "eos_token", "stop": "stop_sequence"}
"""TGI's names of finish reasons. All other reasons are "length"."""
TGI_ERRORS = {400: (422, "validation"), 429: (429, "overloaded"), 500: (424, "generation")}
router = APIRouter()


# Bodies.
class TgiGrammar(Fields):
    type: Literal["regex", "json", "json_schema"]
    value: Written | Object

    def constraint(self) -> TextConstraint:
        """Return the constraint. Raises Problem."""
        kind: ConstraintKind = "regex" if self.type == "regex" else "json_schema"
        value = self.value
        if self.type == "json_schema" and isinstance(value, dict):
            value = value.get("schema", value)
        if kind == "regex" and not isinstance(value, str):
            raise invalid("grammar.value must be a regular expression", "grammar")
        return TextConstraint(kind, value, "grammar")


class GenerateParameters(Sampled):
    refused: ClassVar[Refused] = {**Sampled.refused, "best_of": (1,)}
    max_tokens: Limit | None = Field(None, validation_alias="max_new_tokens")
    truncate_prompt_tokens: Count | None = Field(None, validation_alias="truncate")
    details: Boolean = False
    do_sample: Boolean | None = None
    return_full_text: Boolean = False
    grammar: TgiGrammar | None = None

    @model_validator(mode="after")
    def _set_temperature(self) -> Self:
        """Set the temperature that the parameters mean. Parameters that change the distribution
        also turn sampling on, as they do in TGI."""
        shapes = self.temperature, self.top_k, self.top_p
        if self.do_sample or any(value not in (None, 0, 1) for value in shapes):
            self.temperature = 1.0 if self.temperature is None else self.temperature
        elif self.temperature == 1 or self.do_sample is False:
            self.temperature = 0.0
        return self


class GenerateRequest(CompletionBody):
    """The body of /generate."""

    inputs: Written
    parameters: GenerateParameters = Field(default_factory=GenerateParameters.model_construct)

    def prepared(self, model: LoadedModel) -> Prepared:
        constraint = self.parameters.grammar and self.parameters.grammar.constraint()
        # TGI's answers have the logprob of every token.
        wanted = Wanted(self.parameters, [constraint] if constraint else [], 0)
        return model.texts([self.inputs], wanted)


# Answers.
class TgiWriter(Writer):
    """The wire format of TGI. listed: Whether a complete answer is in a list."""

    body: GenerateRequest
    listed = False
    _index = 0
    _ended = False

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        status, kind = TGI_ERRORS.get(problem.status, (problem.status, "incomplete_generation"))
        return status, {"error": problem.message, "error_type": kind}

    def answer(self, choices: Sequence[Choice]) -> Payload | list[Payload]:
        [choice] = choices
        answer, tokens = self.last(choice, ()), [self._token(token) for token in choice.logprobs]
        details = {**answer.pop("details"), "prefill": [], "tokens": tokens}
        answer |= {"details": details} if self.body.parameters.details else {}
        return [answer] if self.listed else answer

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> list[Payload]:
        """Return a payload for each token. The last one also has the complete text."""
        tokens = [self._token(token) for token in step.logprobs]
        if "".join(token["text"] for token in tokens) != step.text and tokens:
            # Tokens may be parts of characters, and text may have been held back. The last token
            # that is not special gets the text, since clients skip special tokens.
            for token in tokens:
                token["text"] = ""
            last = next((token for token in reversed(tokens) if not token["special"]), tokens[-1])
            last |= {"text": step.text, "special": False}
        payloads = [self._payload(token) for token in tokens]
        if payloads and choice.finish_reason is not None:
            payloads[-1] |= self.last(choice, ())
        return payloads

    def end(self, choice: Choice) -> Iterator[Payload]:
        """Yield the end of a text, unless the payload of the last token had it."""
        if not self._ended:
            nothing = {"id": 0, "text": "", "logprob": 0.0, "special": True}
            yield {**self._payload(nothing), **self.last(choice, ())}

    def _payload(self, token: Payload) -> Payload:
        self._index += 1
        return {"index": self._index, "token": token, "generated_text": None, "details": None}

    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        self._ended = True
        details = {
            "finish_reason": TGI_REASONS.get(choice.finish_reason or "length", "length"),
            "generated_tokens": choice.tokens,
            "seed": self.prepared.requests[0].options.seed,
            "input_length": self.prepared.prompt_tokens,
        }
        before = self.body.inputs if self.body.parameters.return_full_text else ""
        return {"generated_text": before + by_kind(choice.events)[0], "details": details}

    def _token(self, token: TokenLogprob) -> Payload:
        piece = token_piece(self.tokenizer, token.token) or b""
        special = token.token in self.tokenizer.special_ids
        return {
            "id": token.token,
            "text": "" if special else piece.decode("utf-8", "replace"),
            "logprob": max(LEAST_LOGPROB, token.logprob),
            "special": special,
        }


class TgiListWriter(TgiWriter):
    """The wire format of TGI's path "/"."""

    listed = True


# Routes.
post(
    router,
    "/",
    GenerateRequest,
    TgiListWriter,
    "Answers TGI's clients, also in a stream",
    streamed(TgiListWriter),
)


@router.post("/generate", summary="Answers TGI's clients")
@router.post(
    "/generate_stream",
    summary="Streams the answer to TGI's clients",
    responses=streamed(TgiWriter),
)
async def generate(body: GenerateRequest, http: Request) -> Response:
    """Continue a text."""
    body.stream = http.scope["path"] == "/generate_stream"
    return await respond(http, body, TgiWriter)


@router.get("/info", summary="Describes the server to TGI's clients")
async def info(http: Request) -> Payload:
    model = loaded_of(http)
    return {
        "model_id": model.name,
        "model_dtype": model.pair.dtype,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": CONNECTIONS,
        "max_input_tokens": model.longest - 1,
        "max_total_tokens": model.longest,
        "version": __version__,
    }
