"""The list of models, for clients of OpenAI, Anthropic and llama.cpp, and for Codex."""

from fastapi import APIRouter, Request

from .answers import Payload
from .registry import ServedModel
from .service import Service, service_of

router = APIRouter()


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
