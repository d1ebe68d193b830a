"""Endpoints of llama.cpp's server: infill, tokenization, properties, health and metrics. The list
of models is also for clients of OpenAI and Anthropic, and for Codex."""

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from ..engine.request import chat_format
from ..results import Step
from ..text.tokenizer import FileTokenizer
from ..text.vocabulary import token_piece
from .engine import CONNECTIONS, STOPPING, as_text
from .events import Event, by_kind
from .fields import BODY_BYTES, Body, Fields, Ids, Several, Written, either
from .internal import Limit, Sampled, Wanted
from .openai import Conversation, Messages
from .problems import busy, invalid
from .registry import Registry, ServedModel
from .requests import CompletionBody, LoadedModel, Prepared
from .service import FINGERPRINT, Choice, Payload, Writer, loaded_of, post, registry_of, streamed

STOPPED = {"eos": "eos", "stop": "word"}
router = APIRouter()
v1 = APIRouter()
"""The routes whose paths may begin with /v1."""


# Bodies.
class ExtraFile(Fields):
    filename: str = "tmp"
    text: str


class InfillRequest(CompletionBody, Sampled):
    """The body of /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: Several[ExtraFile] = []  # noqa: RUF012
    max_tokens: Limit | None = either(None, "n_predict", "max_tokens")
    response_fields: Several[str] = []  # noqa: RUF012

    def prepared(self, model: LoadedModel) -> Prepared:
        before, files = self.input_prefix + self.prompt, self.input_extra
        others = [(file.filename, file.text) for file in files]
        return model.infill(before, self.input_suffix, others, Wanted(self))


class TokenizeRequest(Conversation):
    """The body of /tokenize: a text (`content`, or vLLM's `prompt`) or messages."""

    messages: Messages | None = None  # type: ignore[assignment]
    content: Written | None = None
    prompt: Written | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: Ids


# Answers.
class InfillWriter(Writer):
    """The wire format of /infill."""

    body: InfillRequest

    def piece(self, choice: Choice, step: Step, events: Iterable[Event]) -> list[Payload]:
        return [{"content": event.text, "stop": False} for event in events]

    def last(self, choice: Choice, events: Sequence[Event]) -> Payload:
        answer: Payload = {
            "content": by_kind(events)[0],
            "index": 0,
            "model": self.model,
            "stop": True,
            "stop_type": STOPPED.get(choice.finish_reason or "", "limit"),
            "tokens_predicted": choice.tokens,
            "tokens_evaluated": self.prepared.prompt_tokens,
            "tokens_cached": self.cached_tokens([choice]),
            **self.timings([choice]),
        }
        flat = {f"timings/{name}": figure for name, figure in answer.get("timings", {}).items()}
        fields, wanted = {**answer, **flat}, self.body.response_fields
        return {name: fields[name] for name in wanted if name in fields} or answer


def tokenize(model: LoadedModel, body: TokenizeRequest) -> Payload:
    """Return the token ids of a text or of messages. Raises Problem."""
    found = [one for one in (body.messages, body.content, body.prompt) if one is not None]
    if len(found) != 1:
        raise invalid("give exactly one of messages, content and prompt", "content")
    [source] = found
    ids = model.text_ids(source) if isinstance(source, str) else model.chat_ids(body.chat())
    return {"tokens": ids, "count": len(ids), "max_model_len": model.longest}


def apply_template(model: LoadedModel, body: Conversation) -> Payload:
    """Return the prompt of messages as text, with special tokens. Raises Problem."""
    ids = model.chat_ids(body.chat())
    tokenizer = model.pair.tokenizer
    names, special = tokenizer.pieces, tokenizer.special_ids
    pieces = []
    for id in ids:
        name = (names[id] or "").encode() if id in special else None
        pieces.append(name or token_piece(tokenizer, id) or b"")
    return {"prompt": b"".join(pieces).decode("utf-8", "replace")}


def detokenize(model: LoadedModel, body: DetokenizeRequest) -> Payload:
    """Return the text of token ids without special tokens. Raises Problem."""
    model.check_ids(body.tokens, "tokens")
    text = model.pair.tokenizer.decode(body.tokens)
    return {"content": text, "prompt": text}


# Routes.
post(router, "/infill", InfillRequest, InfillWriter, "Fills in a text", streamed(InfillWriter))
post(router, "/tokenize", TokenizeRequest, tokenize, "Tokenizes a text or a chat")
post(router, "/apply-template", Conversation, apply_template, "Writes a chat's prompt")
post(router, "/detokenize", DetokenizeRequest, detokenize, "Returns the text of token ids")


@router.get("/props", summary="Describes the model and its defaults")
async def props(http: Request) -> Payload:
    """Describe the model, its options and the limits of the server."""
    model, registry = loaded_of(http), registry_of(http)
    pair, options, settings = model.pair, model.options, model.settings
    generation = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    seed = None if settings.drawn_seeds else options.seed
    limits = {"body_bytes": BODY_BYTES, "context": settings.context, "seconds": settings.seconds}
    tokenizer = pair.tokenizer
    template = ""
    if isinstance(tokenizer, FileTokenizer) and tokenizer.has_chat_template:
        template = tokenizer.templated.chat_template
    return {
        "model_alias": model.name,
        "model_path": model.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template,
        "total_slots": registry.batch_size,
        "n_ctx": model.longest,
        "chat": chat_format(pair, options).way,
        "task_prefix": pair.task_prefix if options.chat_template else "",
        "rule": options.rule_name,
        "lossy": options.lossy,
        "num_draft": 0 if options.regular else options.num_draft,
        "has_draft_model": pair.draft is not None,
        "default_generation_settings": {name: getattr(options, name) for name in generation}
        | {"seed": seed, "n_ctx": model.longest},
        "limits": {**limits, "connections": CONNECTIONS},
        "build_info": FINGERPRINT,
    }


@v1.get("/health", summary="Says whether requests are taken")
async def health(http: Request) -> Payload:
    """Report whether requests are accepted and make progress. Raises Problem if not."""
    registry = registry_of(http)
    if registry.begins:
        raise registry.not_loaded(registry.first)
    if registry.closed:
        raise busy(STOPPING, code="stopping")
    troubles = (engine.trouble for engine in registry.engines)
    if trouble := next(filter(None, troubles), None):
        raise busy(f"texts make no progress: {trouble}", code="no_progress")
    failures = [engine.failures for engine in registry.engines if engine.failures.count]
    last = {"last_failure": failures[-1].last} if failures else {}
    return {"status": "ok", "failures": sum(one.count for one in failures), **last}


@router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    numbers = {model.name: model.numbers for model in registry_of(http).models}
    return Response(as_text(numbers), media_type="text/plain; version=0.0.4; charset=utf-8")


@v1.get("/models", summary="The models and their states")
async def models(http: Request) -> Payload:
    """List all models: in `data` for OpenAI's and Anthropic's clients, in `models` for Codex."""
    registry = registry_of(http)
    listed = [_described(registry, model) for model in registry.models]
    first, last = listed[0]["id"], listed[-1]["id"]
    answer = {"object": "list", "data": listed, "models": [_for_codex(model) for model in listed]}
    return {**answer, "first_id": first, "last_id": last, "has_more": False}


@v1.get("/models/{id:path}", summary="One model")
async def model(id: str, http: Request) -> Payload:
    """Describe a model by one of its names."""
    registry = registry_of(http)
    return _described(registry, registry.named(id))


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


def _described(registry: Registry, of: ServedModel) -> Payload:
    model: Payload = {"id": of.name, "object": "model", "created": registry.created}
    model |= {"owned_by": "mlx-specdec", "type": "model", "display_name": of.name}
    # llama.cpp's names of the state and the size.
    model |= {"status": {"value": of.state}, "meta": {"size": of.nbytes or None}}
    if not of.facts.longest:
        return model
    # vLLM, OpenRouter and llama.cpp have different names for the context length.
    longest = of.facts.longest
    model["meta"]["n_ctx_train"] = longest
    return {**model, **dict.fromkeys(("max_model_len", "context_length"), longest)}
