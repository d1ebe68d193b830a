"""The API of Hugging Face's text-generation-inference. Unlike in TGI, completions never include the
stop string."""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from ..results import Step, TokenLogprob
from ..version import __version__
from .answers import LEAST_LOGPROB, Choice, Payload, Writer, token_piece
from .events import Event
from .fields import Body, Boolean, Fields, Refused
from .internal import Count, Limit, Sampled, TextConstraint, Wanted
from .problems import Problem, invalid
from .requests import LoadedModel
from .service import complete, loaded_of
from .shared_bodies import JsonSchema, Written, schema_constraint

TGI_REASONS = {"eos": "eos_token", "stop": "stop_sequence"}
"""TGI's names of finish reasons. All other reasons are "length"."""
TGI_ERRORS = {400: (422, "validation"), 429: (429, "overloaded"), 500: (424, "generation")}
router = APIRouter()


# Bodies.
class TgiGrammar(Fields):
    type: Literal["regex", "json", "json_schema"]
    value: Written | JsonSchema

    def constraint(self) -> TextConstraint:
        """Return the constraint. Raises Problem."""
        value = self.value
        if self.type == "json_schema" and isinstance(value, dict):
            value = value.get("schema", value)
        if self.type != "regex":
            return schema_constraint(value, "grammar")
        if not isinstance(value, str):
            raise invalid("grammar.value must be a regular expression", "grammar")
        return TextConstraint("regex", value, "grammar")


class GenerateParameters(Sampled):
    refused: ClassVar[Refused] = {**Sampled.refused, "best_of": (1,)}
    max_tokens: Limit | None = Field(None, validation_alias="max_new_tokens")
    truncate_prompt_tokens: Count | None = Field(None, validation_alias="truncate")
    details: Boolean = False
    do_sample: Boolean | None = None
    return_full_text: Boolean = False
    grammar: TgiGrammar | None = None

    def sampled(self) -> Sampled:
        """Return the parameters with the temperature that they mean. Parameters that change the
        distribution also turn sampling on, as they do in TGI."""
        temperature, shapes = self.temperature, (self.temperature, self.top_k, self.top_p)
        if self.do_sample or any(value not in (None, 0, 1) for value in shapes):
            temperature = 1.0 if temperature is None else temperature
        elif temperature == 1 or self.do_sample is False:
            temperature = 0.0
        return self.model_copy(update={"temperature": temperature})


class GenerateRequest(Body):
    """The body of /generate."""

    inputs: Written
    stream: Boolean | None = None
    parameters: GenerateParameters = Field(default_factory=GenerateParameters.model_construct)


# Answers.
class TgiWriter(Writer):
    """The wire format of TGI. stream: Whether the answer is a stream, or None at the path "/", at
    which the body decides, and a complete answer is a list."""

    _index = 0
    _ended = False

    def __init__(self, model: LoadedModel, body: GenerateRequest, *, stream: bool | None) -> None:
        parameters = body.parameters
        constraints = [] if parameters.grammar is None else [parameters.grammar.constraint()]
        # TGI's answers have the logprob of every token.
        prepared = model.texts([body.inputs], Wanted(parameters.sampled(), constraints, 0))
        super().__init__(model.name, prepared, stream=body.stream if stream is None else stream)
        self._before = body.inputs if parameters.return_full_text else ""
        self._details = parameters.details
        self._listed, self._tokenizer = stream is None, model.pair.tokenizer

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        """Return the HTTP status and the body with which TGI's API reports an error."""
        status, kind = TGI_ERRORS.get(problem.status, (problem.status, "incomplete_generation"))
        return status, {"error": problem.message, "error_type": kind}

    def answer(self, choices: Sequence[Choice]) -> Payload | list[Payload]:
        [choice] = choices
        answer = self._last(choice)
        tokens = [self._token(token) for token in choice.logprobs]
        details = {**answer.pop("details"), "prefill": [], "tokens": tokens}
        answer |= {"details": details} if self._details else {}
        return [answer] if self._listed else answer

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
            payloads[-1] |= self._last(choice)
        return payloads

    def end(self, choice: Choice) -> Iterator[Payload]:
        """Yield the end of a text, unless the payload of the last token had it."""
        if not self._ended:
            nothing = {"id": 0, "text": "", "logprob": 0.0, "special": True}
            yield {**self._payload(nothing), **self._last(choice)}

    def _payload(self, token: Payload) -> Payload:
        self._index += 1
        return {"index": self._index, "token": token, "generated_text": None, "details": None}

    def _last(self, choice: Choice) -> Payload:
        self._ended = True
        details = {
            "finish_reason": TGI_REASONS.get(choice.finish_reason or "length", "length"),
            "generated_tokens": choice.tokens,
            "seed": self.prepared.requests[0].options.seed,
            "input_length": self.prepared.prompt_tokens,
        }
        return {"generated_text": "".join([self._before, *choice.texts]), "details": details}

    def _token(self, token: TokenLogprob) -> Payload:
        piece = token_piece(self._tokenizer, token.token) or b""
        special = token.token in self._tokenizer.special_ids
        return {
            "id": token.token,
            "text": "" if special else piece.decode("utf-8", "replace"),
            "logprob": max(LEAST_LOGPROB, token.logprob),
            "special": special,
        }


# Routes.
@router.post("/generate", summary="Answers TGI's clients")
async def generate(body: GenerateRequest, http: Request) -> Response:
    """Continue a text."""
    return await complete(http, body, lambda *made: TgiWriter(*made, stream=False))


@router.post("/generate_stream", summary="Streams the answer to TGI's clients")
async def generate_stream(body: GenerateRequest, http: Request) -> Response:
    """Continue a text in a stream."""
    return await complete(http, body, lambda *made: TgiWriter(*made, stream=True))


@router.post("/", summary="Answers TGI's clients, also in a stream")
async def generate_either(body: GenerateRequest, http: Request) -> Response:
    """Continue a text, in a stream if the body has `stream`."""
    return await complete(http, body, lambda *made: TgiWriter(*made, stream=None))


@router.get("/info", summary="Describes the server to TGI's clients")
async def info(http: Request) -> Payload:
    """Describe the server."""
    model = loaded_of(http)
    return {
        "model_id": model.name,
        "model_dtype": model.pair.dtype,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": model.settings.connections,
        "max_input_tokens": model.longest - 1,
        "max_total_tokens": model.longest,
        "version": __version__,
    }
