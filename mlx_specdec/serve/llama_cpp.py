"""Endpoints of llama.cpp's server: tokens and texts, properties, health and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .answers import FINGERPRINT
from .body import Body
from .chat import way_of
from .metrics import CONTENT_TYPE
from .problems import busy
from .requests import RequestParser
from .service import Service, get, post


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text (`content`, or vLLM's `prompt`) or of messages."""

    def ids_of(parser: RequestParser, body: Body) -> tuple[list[int], int]:
        body = parser.check("TokenizeRequest", body)
        if "messages" in body:
            return parser.chat_ids(body), parser.longest
        return parser.text_ids(body.get("content") or body["prompt"]), parser.longest

    ids, longest = await service.parse(request, ids_of)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": longest})


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids without special tokens."""

    def text_of(parser: RequestParser, body: Body) -> str:
        tokens = parser.check("DetokenizeRequest", body)["tokens"]
        return parser.pair.tokenizer.decode(tokens)

    text = await service.parse(request, text_of)
    return JSONResponse({"content": text, "prompt": text})


async def props(service: Service, request: Request) -> Response:
    """Describe the model, its options and the limits of the server."""
    parser, limits = service.parser(), service.settings.limits
    pair, options = parser.pair, parser.options
    generation = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    seed = None if service.settings.drawn_seeds else options.seed
    shown = ("body_bytes", "waiting", "seconds", "choices", "stops", "schema_bytes", "schema_depth")
    return JSONResponse(
        {
            "model_alias": service.name,
            "total_slots": service.engine.batch_size,
            "n_ctx": parser.longest,
            "chat": way_of(pair, options),
            "task_prefix": pair.task_prefix if options.chat_template else "",
            "rule": options.rule_name,
            "lossy": options.lossy,
            "num_draft": 0 if options.regular else options.num_draft,
            "has_draft_model": pair.draft is not None,
            "default_generation_settings": {
                **{name: getattr(options, name) for name in generation},
                "seed": seed,
            },
            "limits": {name: getattr(limits, name) for name in shown},
            "build_info": FINGERPRINT,
        }
    )


async def health(service: Service, request: Request) -> Response:
    """Say whether requests are taken and make progress."""
    service.parser()
    engine = service.engine
    if trouble := engine.trouble:
        raise busy(f"texts make no progress: {trouble}", code="no_progress")
    failures = engine.failures
    last = {"last_failure": failures.last} if failures.count else {}
    return JSONResponse({"status": "ok", "failures": failures.count, **last})


async def metrics(service: Service, request: Request) -> Response:
    """Return all metrics for Prometheus."""
    engine = service.engine
    nbytes = {
        "prompt_cache_bytes": (engine.cached_bytes, "Bytes of what is kept of prompts."),
        "memory_reserved_bytes": (engine.reserved_bytes, "Bytes that requests may take."),
        "memory_budget_bytes": (
            engine.budget.nbytes if engine.ready.is_set() else 0,
            "Bytes that all requests together may take.",
        ),
    }
    text = engine.metrics.as_text(service.name, *engine.requests, nbytes)
    return Response(text, media_type=CONTENT_TYPE)


ENDPOINTS = (
    post("/tokenize", tokenize, "TokenizeRequest", "Tokens", "Token ids of a text or a chat"),
    post("/detokenize", detokenize, "DetokenizeRequest", "Detokenized", "The text of token ids"),
    get("/props", props, "Anything", "What is served, and how"),
    get("/health", health, "Anything", "Whether requests are taken"),
    get("/v1/health", health, "Anything", "The same"),
    get("/metrics", metrics, "Text", "Prometheus' figures", "text/plain"),
)
