"""Counters of each model in Prometheus' text format, under vLLM's names where vLLM has one, so that
tools for vLLM can read them."""

import math
import threading
from collections import Counter
from collections.abc import Mapping

from ..results import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, math.inf)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, math.inf)
GENERATED = "vllm:generation_tokens_total"
CANCELLED = "mlx_specdec:requests_cancelled_total"
REJECTED = "mlx_specdec:requests_rejected_total"
FAILED = "mlx_specdec:requests_failed_total"
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FINISHED = "vllm:request_success_total"
FIRST_TOKEN = "vllm:time_to_first_token_seconds"
BETWEEN_TOKENS = "vllm:inter_token_latency_seconds"
LAST_TOKEN = "vllm:e2e_request_latency_seconds"
HISTOGRAMS = (FIRST_TOKEN, BETWEEN_TOKENS, LAST_TOKEN)
LABELLED = (*HISTOGRAMS, POSITIONS, FINISHED)
DESCRIPTIONS = {
    "vllm:prompt_tokens_total": "Tokens of prompts.",
    GENERATED: "Tokens of answers.",
    "vllm:prefix_cache_queries_total": "Prompt tokens looked for in the cache.",
    "vllm:prefix_cache_hits_total": "Prompt tokens that were not read again.",
    CANCELLED: "Clients that left, or were too late.",
    REJECTED: "Requests that found the queue full.",
    FAILED: "Requests that an error here ended.",
    "vllm:spec_decode_num_drafts_total": "Rounds with draft tokens, of each request.",
    "vllm:spec_decode_num_draft_tokens_total": "Draft tokens.",
    "vllm:spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted.",
    POSITIONS: "Accepted tokens by their position in the draft.",
    FINISHED: "Requests with a whole answer.",
    FIRST_TOKEN: "From the request to its first token.",
    BETWEEN_TOKENS: "From token to token.",
    LAST_TOKEN: "From the request to its last token.",
}
"""The description of each counter and histogram, by its name."""
VLLM = "vllm:"
ENGINE = 'engine="0"'
"""A label that vLLM adds to its metrics. vLLM can have several engines for a model."""


class Metrics:
    """The counters and histograms of a model, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Numbers by name and label. A number without a label has the label "".
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._numbers.update({(name, ""): 0 for name in DESCRIPTIONS if name not in LABELLED})
        for name in HISTOGRAMS:
            self._observe(name, 0.0, 0)

    def count(self, name: str, by: int = 1) -> None:
        """Count cancelled, rejected or failed requests."""
        with self._lock:
            self._numbers[name, ""] += by

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count new tokens. seconds: Time since the request's last tokens, or since its arrival."""
        with self._lock:
            self._numbers[GENERATED, ""] += count
            if first:
                self._observe(FIRST_TOKEN, seconds)
            else:
                self._observe(BETWEEN_TOKENS, seconds / count, count)

    def finished(self, result: Result, seconds: float) -> None:
        """Count a request that ended. seconds: Time since its arrival."""
        stats, labels = result.stats, result.labels
        counts = {
            "vllm:prompt_tokens_total": labels.prompt_tokens,
            "vllm:prefix_cache_queries_total": labels.prompt_tokens,
            "vllm:prefix_cache_hits_total": labels.cached_tokens,
            "vllm:spec_decode_num_drafts_total": next(iter(stats.drafted_by_position), 0),
            "vllm:spec_decode_num_draft_tokens_total": stats.drafted,
            "vllm:spec_decode_num_accepted_tokens_total": stats.accepted,
        }
        with self._lock:
            self._observe(LAST_TOKEN, seconds)
            self._numbers[FINISHED, f'finished_reason="{result.finish_reason}"'] += 1
            self._numbers.update({(name, ""): count for name, count in counts.items()})
            for position, accepted in enumerate(stats.accepted_by_position):
                self._numbers[POSITIONS, f'position="{position}"'] += accepted

    def _observe(self, name: str, seconds: float, times: int = 1) -> None:
        for edge in TOKEN_SECONDS if name == BETWEEN_TOKENS else SECONDS:
            label = 'le="+Inf"' if edge == math.inf else f'le="{edge}"'
            self._numbers[f"{name}_bucket", label] += times * (seconds <= edge)
        self._numbers[f"{name}_sum", ""] += times * seconds  # type: ignore[assignment]
        self._numbers[f"{name}_count", ""] += times

    def now(self) -> Counter[tuple[str, str]]:
        """Return a copy of the numbers, by name and label."""
        with self._lock:
            return self._numbers.copy()


def as_text(
    models: Mapping[str, Metrics],
    gauges: Mapping[str, tuple[float | Mapping[str, float], str]],
) -> str:
    """Return all metrics in Prometheus' text format. Under vLLM's names, every model has separate
    numbers. Other counters are sums over all models.

    Args:
        models: The metrics of each model, by name.
        gauges: Further numbers, or numbers by model, and their descriptions, by name.
    """
    lines: list[str] = []
    for name, (number, description) in gauges.items():
        lines += _head(name, "gauge", description)
        by_model = number if isinstance(number, Mapping) else {"": number}
        lines += (_line(name, model, "", value) for model, value in by_model.items())
    numbers = {model: metrics.now() for model, metrics in models.items()}
    total = {"": Counter[tuple[str, str]]()}
    for counts in numbers.values():
        total[""].update(counts)
    for name, description in DESCRIPTIONS.items():
        lines += _head(name, "histogram" if name in HISTOGRAMS else "counter", description)
        for model, counts in (numbers if name.startswith(VLLM) else total).items():
            found = (place for place in counts if place[0].startswith(name))
            lines += (_line(own, model, label, counts[own, label]) for own, label in found)
    return "\n".join([*lines, ""])


def _line(name: str, model: str, label: str, value: float) -> str:
    """Return the line of a number. model: The name of a model, or ""."""
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    engine = ENGINE if name.startswith(VLLM) else ""
    labels = ",".join(filter(None, [model and f'model_name="{escaped}"', engine, label]))
    return f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def _head(name: str, kind: str, description: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
