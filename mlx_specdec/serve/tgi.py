"""The API of Hugging Face's text-generation-inference. Unlike in TGI, completions never include the
stop string."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from starlette.requests import Request

from ..results import Step, TokenLogprob
from ..version import __version__
from . import answer_models
from .answers import LEAST_LOGPROB, Choice, Payload, Writer, token_pieces
from .bodies import Body, Boolean, ByType, Fields
from .events import Event
from .models import (
    Count,
    InnerSchema,
    JsonSchema,
    MaxTokens,
    Penalty,
    Repetition,
    Sampled,
    Stop,
    Stops,
    TextRequest,
    Written,
)
from .problems import Problem
from .requests import ParsedRequest, RequestParser
from .service import Endpoint, Service

NEUTRAL = {"temperature": 1, "top_k": -1, "top_p": 1}
"""Parameters that change the distribution, with the value, besides 0, that changes nothing."""
COMPLETION_FIELDS = (
    *(*NEUTRAL, "max_tokens", "seed", "stop", "frequency_penalty", "repetition_penalty"),
    "truncate_prompt_tokens",
)
"""Parameters that a text completion of OpenAI's API has as well."""
TGI_REASONS = {"eos": "eos_token", "stop": "stop_sequence"}
"""TGI's names of finish reasons. All other reasons are "length"."""
TGI_ERRORS = {400: (422, "validation"), 429: (429, "overloaded"), 500: (424, "generation")}


class RegexGrammar(Fields):
    type: Literal["regex"]
    value: Written


class JsonGrammar(Fields):
    type: Literal["json"]
    value: Written | JsonSchema


class SchemaGrammar(Fields):
    type: Literal["json_schema"]
    value: InnerSchema


GRAMMAR = ByType(
    *(RegexGrammar, JsonGrammar, SchemaGrammar), words='{"type": "json" or "regex", "value": ...}'
)


class GenerateParameters(Sampled):
    same: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "max_tokens",
        "truncate": "truncate_prompt_tokens",
    }
    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        "adapter_id": (),
        "top_n_tokens": (0,),
        **dict.fromkeys(("best_of", "typical_p"), (1,)),
        **dict.fromkeys(("decoder_input_details", "watermark"), (False,)),
    }
    max_new_tokens: MaxTokens | None = None
    repetition_penalty: Repetition | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | Stops | None = None
    truncate: Count | None = None
    details: Boolean | None = None
    do_sample: Boolean | None = None
    return_full_text: Boolean | None = None
    grammar: Annotated[Any, GRAMMAR] | None = None


class GenerateRequest(Fields):
    """The body of /generate."""

    inputs: Written
    stream: Boolean | None = None
    parameters: GenerateParameters | None = None


class TgiWriter(Writer):
    """The wire format of TGI. stream: Whether the answer is a stream, or None at the path "/", at
    which the body decides, and a complete answer is a list."""

    _index = 0
    _ended = False

    def __init__(self, parser: RequestParser, body: Body, stream: bool | None) -> None:
        self._parameters = body.get("parameters", {})
        super().__init__(parser, body)
        self._listed = stream is None
        if stream is not None:
            self.stream = stream

    def parse(self, body: Body) -> ParsedRequest:
        parameters = self._parameters
        completion = {name: parameters[name] for name in COMPLETION_FIELDS if name in parameters}
        # As in TGI, parameters that change the distribution also turn sampling on.
        shaped = any(
            completion.get(name, 0) not in (neutral, 0) for name, neutral in NEUTRAL.items()
        )
        if parameters.get("do_sample") or shaped:
            completion.setdefault("temperature", 1.0)
        elif completion.get("temperature") == 1 or parameters.get("do_sample") is False:
            completion["temperature"] = 0.0
        if "grammar" in parameters:
            kind, value = parameters["grammar"]["type"], parameters["grammar"]["value"]
            if kind == "json_schema":
                kind, value = "json", value["schema"]
            completion["structured_outputs"] = {kind: value}
        # TGI's answers have the logprob of every token.
        completion |= {"prompt": body["inputs"], "logprobs": 0}
        return self.parser.completions(TextRequest.read(completion))

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        status, kind = TGI_ERRORS.get(problem.status, (problem.status, "incomplete_generation"))
        return status, {"error": problem.message, "error_type": kind}

    def answer(self, choices: Sequence[Choice]) -> Payload | list[Payload]:
        [choice] = choices
        answer: Payload = {"generated_text": self._text(choice)}
        if self._parameters.get("details"):
            tokens = [self._token(token) for token in choice.logprobs]
            answer["details"] = {**self._end(choice), "prefill": [], "tokens": tokens}
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

    def end(self, choice: Choice) -> list[Payload]:
        """Return the end of a text, unless the payload of the last token had it."""
        if self._ended:
            return []
        nothing = {"id": 0, "text": "", "logprob": 0.0, "special": True}
        return [{**self._payload(nothing), **self._last(choice)}]

    def _payload(self, token: Payload) -> Payload:
        self._index += 1
        return {"index": self._index, "token": token, "generated_text": None, "details": None}

    def _last(self, choice: Choice) -> Payload:
        self._ended = True
        details = {**self._end(choice), "input_length": self.request.prompt_tokens}
        return {"generated_text": self._text(choice), "details": details}

    def _end(self, choice: Choice) -> Payload:
        return {
            "finish_reason": TGI_REASONS.get(choice.finish_reason or "length", "length"),
            "generated_tokens": choice.tokens,
            "seed": self.request.requests[0].options.seed,
        }

    def _text(self, choice: Choice) -> str:
        before = self.body["inputs"] if self._parameters.get("return_full_text") else ""
        return "".join([before, *choice.texts])

    def _token(self, token: TokenLogprob) -> Payload:
        tokenizer = self.parser.pair.tokenizer
        pieces, special = token_pieces(tokenizer), token.token in tokenizer.special_ids
        piece = (pieces[token.token] if token.token < len(pieces) else None) or b""
        return {
            "id": token.token,
            "text": "" if special else piece.decode("utf-8", "replace"),
            "logprob": max(LEAST_LOGPROB, token.logprob),
            "special": special,
        }


def info(service: Service, request: Request) -> Payload:
    """Describe the server."""
    parser, registry = service.parser(request), service.registry
    return {
        "model_id": parser.name,
        "model_dtype": parser.pair.dtype,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": registry.batch_size + registry.waiting,
        "max_best_of": 1,
        "max_stop_sequences": parser.settings.limits.stops,
        "max_input_tokens": parser.longest - 1,
        "max_total_tokens": parser.longest,
        "version": __version__,
        "router": "mlx-specdec",
    }


ENDPOINTS = (
    *(
        Endpoint(
            path,
            functools.partial(TgiWriter, stream=stream),
            answer_models.AnyGenerated if stream is None else answer_models.GeneratedAnswer,
            "The same as a stream" if stream else "Answers TGI's clients",
            GenerateRequest,
            error=TgiWriter.error,
        )
        for path, stream in (("/generate", False), ("/generate_stream", True), ("/", None))
    ),
    Endpoint("/info", info, answer_models.Anything, "What is served, for TGI's clients"),
)
