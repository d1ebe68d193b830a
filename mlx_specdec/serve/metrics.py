"""Counters and gauges of each model in Prometheus' text format. Counters that vLLM also has are
named as in vLLM, so that tools for vLLM can read them."""

from collections.abc import Mapping

from ..results import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GENERATED = "vllm:generation_tokens_total"
CANCELLED = "mlx_specdec:requests_cancelled_total"
REJECTED = "mlx_specdec:requests_rejected_total"
FAILED = "mlx_specdec:requests_failed_total"
METRICS = {
    "mlx_specdec:prompt_cache_bytes": "Bytes of the prompt cache.",
    "mlx_specdec:history_bytes": "Bytes of texts that are looked up.",
    "mlx_specdec:memory_reserved_bytes": "Bytes that requests may take.",
    "mlx_specdec:memory_budget_bytes": "Bytes that all requests may take together.",
    "mlx_specdec:model_loaded": "Whether the model is in memory.",
    "mlx_specdec:model_bytes": "Bytes of its weights in memory.",
    "mlx_specdec:model_requests_running": "Requests decoded now.",
    "mlx_specdec:model_requests_waiting": "Requests waiting now.",
    "vllm:prompt_tokens_total": "Tokens of prompts.",
    GENERATED: "Tokens of answers.",
    "vllm:prefix_cache_queries_total": "Prompt tokens looked for in the cache.",
    "vllm:prefix_cache_hits_total": "Prompt tokens that were not read again.",
    "vllm:request_success_total": "Requests with a whole answer.",
    CANCELLED: "Clients that left, or were too late.",
    REJECTED: "Requests that found the queue full.",
    FAILED: "Requests that an error here ended.",
    "vllm:spec_decode_num_drafts_total": "Rounds with draft tokens, of each request.",
    "vllm:spec_decode_num_draft_tokens_total": "Draft tokens.",
    "vllm:spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted.",
}
"""The description of each metric, by its name. The names of counters end with _total, and all other
metrics are gauges."""


def counts_of(result: Result) -> dict[str, int]:
    """Return what a request that has ended adds to the counters, by the counter's name."""
    stats, labels = result.stats, result.labels
    return {
        "vllm:prompt_tokens_total": labels.prompt_tokens,
        "vllm:prefix_cache_queries_total": labels.prompt_tokens,
        "vllm:prefix_cache_hits_total": labels.cached_tokens,
        "vllm:request_success_total": 1,
        "vllm:spec_decode_num_drafts_total": next(iter(stats.drafted_by_position), 0),
        "vllm:spec_decode_num_draft_tokens_total": stats.drafted,
        "vllm:spec_decode_num_accepted_tokens_total": stats.accepted,
    }


def as_text(models: Mapping[str, Mapping[str, float]]) -> str:
    """Return all metrics in Prometheus' text format. models: The numbers of each model by the names
    of the metrics, by the name of the model. A metric without a number is 0."""
    lines = []
    for name, description in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
        for model, numbers in models.items():
            escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            lines.append(f'{name}{{model_name="{escaped}"}} {numbers.get(name, 0)}')
    return "\n".join([*lines, ""])
