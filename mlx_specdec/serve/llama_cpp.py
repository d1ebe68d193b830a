"""Endpoints of llama.cpp's server: infill, tokenization, properties, health and metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Self

from pydantic import StrictInt, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ..engine.chat import chat_format
from ..results import Step
from ..text.tokenizer import DirectoryTokenizer
from .answer_models import Anything, DetokenizedAnswer, TokensAnswer
from .answers import FINGERPRINT, Choice, Payload, Writer, token_pieces
from .bodies import Body, Boolean, Fields, String, broken
from .engine import STOPPING
from .events import Event
from .metrics import CONTENT_TYPE, as_text
from .models import MaxTokens, Messages, Sampled, Stop, Stops, Templated, ToolList, Written
from .openai import timings
from .problems import busy
from .registry import ServedModel
from .requests import ParsedRequest, RequestParser
from .service import Endpoint, Service

STOPPED = {"eos": "eos", "stop": "word"}


class ExtraFile(Fields):
    filename: String | None = None
    text: String


class InfillRequest(Sampled):
    """The body of /infill."""

    same: ClassVar[Mapping[str, str]] = {"n_predict": "max_tokens"}
    model: String | None = None
    input_prefix: String | None = None
    input_suffix: String | None = None
    prompt: String | None = None
    input_extra: list[ExtraFile] | None = None
    n_predict: MaxTokens | None = None
    stop: Stop | Stops | None = None
    stream: Boolean | None = None
    response_fields: list[String] | None = None


class TemplateRequest(Templated):
    """The body of /apply-template."""

    model: String | None = None
    messages: Messages
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto"] | None = None


class TokenizeRequest(Templated):
    """The body of /tokenize."""

    model: String | None = None
    content: Written | None = None
    prompt: Written | None = None
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        sources = (self.messages, self.content, self.prompt)
        if sum(source is not None for source in sources) != 1:
            raise broken("give exactly one of messages, content and prompt", "content")
        return self


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    tokens: list[StrictInt]


class InfillWriter(Writer):
    """The wire format of /infill."""

    def parse(self, body: Body) -> ParsedRequest:
        return self.parser.infill(body)

    def answer(self, choices: Sequence[Choice]) -> Payload:
        [choice] = choices
        return self._last(choice, "".join(choice.texts))

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> list[Payload]:
        return [{"content": step.text, "stop": False}] if step.text else []

    def end(self, choice: Choice) -> list[Payload]:
        return [self._last(choice, "")]

    def _last(self, choice: Choice, text: str) -> Payload:
        answer: Payload = {
            "content": text,
            "index": 0,
            "model": self.parser.name,
            "stop": True,
            "stop_type": STOPPED.get(choice.finish_reason or "", "limit"),
            "tokens_predicted": choice.tokens,
            "tokens_evaluated": self.request.prompt_tokens,
            "tokens_cached": self.cached_tokens([choice]),
            **timings([choice]),
        }
        flat = {f"timings/{name}": figure for name, figure in answer.get("timings", {}).items()}
        fields, wanted = {**answer, **flat}, self.body.get("response_fields") or ()
        return {name: fields[name] for name in wanted if name in fields} or answer


def tokenize(parser: RequestParser, body: Body) -> Payload:
    """Return the token ids of a text (`content`, or vLLM's `prompt`) or of messages."""
    if "messages" in body:
        ids = parser.chat_ids(body)
    else:
        ids = parser.text_ids(body.get("content") or body["prompt"])
    return {"tokens": ids, "count": len(ids), "max_model_len": parser.longest}


def apply_template(parser: RequestParser, body: Body) -> Payload:
    """Return the prompt of messages as text, with special tokens."""
    ids = parser.chat_ids(body)
    tokenizer = parser.pair.tokenizer
    texts, names, special = token_pieces(tokenizer), tokenizer.pieces(), tokenizer.special_ids
    pieces = ((names[id] or "").encode() if id in special else texts[id] or b"" for id in ids)
    return {"prompt": b"".join(pieces).decode("utf-8", "replace")}


def detokenize(parser: RequestParser, body: Body) -> Payload:
    """Return the text of token ids without special tokens."""
    parser.check_ids(body["tokens"], "tokens")
    text = parser.pair.tokenizer.decode(body["tokens"])
    return {"content": text, "prompt": text}


def props(service: Service, request: Request) -> Payload:
    """Describe the model, its options and the limits of the server."""
    parser, registry = service.parser(request), service.registry
    pair, options, limits = parser.pair, parser.options, parser.settings.limits
    generation = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    seed = None if parser.settings.drawn_seeds else options.seed
    shown = ("body_bytes", "waiting", "seconds", "choices", "stops", "schema_bytes", "schema_depth")
    tokenizer = pair.tokenizer
    template = ""
    if isinstance(tokenizer, DirectoryTokenizer) and tokenizer.has_chat_template:
        template = tokenizer.templated.chat_template
    return {
        "model_alias": parser.name,
        "model_path": parser.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template,
        "total_slots": registry.batch_size,
        "n_ctx": parser.longest,
        "chat": chat_format(pair, options).way,
        "task_prefix": pair.task_prefix if options.chat_template else "",
        "rule": options.rule_name,
        "lossy": options.lossy,
        "num_draft": 0 if options.regular else options.num_draft,
        "has_draft_model": pair.draft is not None,
        "default_generation_settings": {name: getattr(options, name) for name in generation}
        | {"seed": seed, "n_ctx": parser.longest},
        "limits": {name: getattr(limits, name) for name in shown},
        "build_info": FINGERPRINT,
    }


def health(service: Service, request: Request) -> Payload:
    """Report whether requests are accepted and make progress. Raises Problem if not."""
    registry = service.registry
    registry.refresh()
    if registry.begins:
        raise registry.not_loaded(registry.first)
    if service.stopping:
        raise busy(STOPPING, code="stopping")
    loaded = [model.engine for model in registry.models if model.state == "loaded"]
    troubles = (engine.trouble for engine in loaded if engine is not None)
    if trouble := next(filter(None, troubles), None):
        raise busy(f"texts make no progress: {trouble}", code="no_progress")
    failures = [engine.failures for engine in registry.engines if engine.failures.count]
    last = {"last_failure": failures[-1].last} if failures else {}
    return {"status": "ok", "failures": sum(one.count for one in failures), **last}


def metrics(service: Service, request: Request) -> Response:
    """Return all metrics for Prometheus."""
    registry = service.registry
    registry.refresh()
    engines = registry.engines
    sizes = [engine.nbytes for engine in engines] or [(0, 0, 0)]
    cached, history, budget = map(sum, zip(*sizes, strict=True))
    gauges: dict[str, tuple[float | dict[str, float], str]] = {
        "mlx_specdec:prompt_cache_bytes": (cached, "Bytes of the prompt cache."),
        "mlx_specdec:history_bytes": (history, "Bytes of texts that are looked up."),
        "mlx_specdec:memory_reserved_bytes": (
            sum(engine.reserved_bytes for engine in engines),
            "Bytes that requests may take.",
        ),
        "mlx_specdec:memory_budget_bytes": (budget, "Bytes that all requests may take together."),
    }
    for name, description, value_of in OF_MODEL:
        values = {model.name: float(value_of(model)) for model in registry.models}
        gauges[name] = values, description
    metrics = {model.name: model.metrics for model in registry.models}
    return Response(as_text(metrics, gauges), media_type=CONTENT_TYPE)


RUNNING, WAITING = "Requests decoded now.", "Requests waiting now."
OWN = "mlx_specdec:model"
OF_MODEL: tuple[tuple[str, str, Callable[[ServedModel], float]], ...] = (
    (f"{OWN}_loaded", "Whether the model is in memory.", lambda model: model.state == "loaded"),
    (f"{OWN}_bytes", "Bytes of its weights in memory.", lambda model: model.loaded_bytes),
    (f"{OWN}_requests_running", RUNNING, lambda model: model.requests[0]),
    (f"{OWN}_requests_waiting", WAITING, lambda model: model.requests[1]),
    ("vllm:num_requests_running", RUNNING, lambda model: model.requests[0]),
    ("vllm:num_requests_waiting", WAITING, lambda model: model.requests[1]),
)
"""The gauges of each model: name, description and value."""


ENDPOINTS = (
    Endpoint("/infill", InfillWriter, Anything, "Fills in a text", InfillRequest),
    Endpoint("/tokenize", tokenize, TokensAnswer, "Token ids of a text or a chat", TokenizeRequest),
    Endpoint("/apply-template", apply_template, Anything, "The text of a chat", TemplateRequest),
    Endpoint(
        "/detokenize", detokenize, DetokenizedAnswer, "The text of token ids", DetokenizeRequest
    ),
    Endpoint("/props", props, Anything, "What is served, and how"),
    Endpoint("/health", health, Anything, "Whether requests are taken"),
    Endpoint("/v1/health", health, Anything, "The same"),
    Endpoint("/metrics", metrics, None, "Prometheus' figures", media="text/plain"),
)
