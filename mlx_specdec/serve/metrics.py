"""Counters of each model in Prometheus' text format, under vLLM's names where vLLM has one, so that
tools for vLLM can read them."""

import copy
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate

from ..results import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
POSITIONS, FINISH_REASONS = "positions", "reasons"
"""Keys of counts that have a label, which is the position or the finish reason."""
COUNTERS = {
    "vllm:prompt_tokens_total": ("prompt", "Tokens of prompts."),
    "vllm:generation_tokens_total": ("generated", "Tokens of answers."),
    "vllm:prefix_cache_queries_total": ("prompt", "Prompt tokens looked for in the cache."),
    "vllm:prefix_cache_hits_total": ("cached", "Prompt tokens that were not read again."),
    "mlx_specdec:requests_cancelled_total": ("cancelled", "Clients that left, or were too late."),
    "mlx_specdec:requests_rejected_total": ("rejected", "Requests that found the queue full."),
    "mlx_specdec:requests_failed_total": ("failed", "Requests that an error here ended."),
    "vllm:spec_decode_num_drafts_total": ("drafts", "Rounds with draft tokens, of each request."),
    "vllm:spec_decode_num_draft_tokens_total": ("drafted", "Draft tokens."),
    "vllm:spec_decode_num_accepted_tokens_total": ("accepted", "Draft tokens that were accepted."),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": (
        POSITIONS,
        "Accepted tokens by their position in the draft.",
    ),
    "vllm:request_success_total": (FINISH_REASONS, "Requests with a whole answer."),
}
"""The key of the count and the description of each counter, by the counter's name."""
VLLM = "vllm:"
ENGINE = 'engine="0"'
"""A label that vLLM adds to its metrics. vLLM can have several engines for a model."""


class Histogram:
    """The number of observations up to each of `edges`, and above the last one."""

    def __init__(self, name: str, edges: tuple[float, ...], description: str) -> None:
        self.name = name
        self.edges = edges
        self.description = description
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` observations of the same value."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += times * value

    def lines(self, labels: str) -> Iterator[str]:
        """Yield the lines of this histogram in Prometheus' text format."""
        name, totals = self.name, accumulate(self.counts)
        for edge, total in zip([*self.edges, "+Inf"], totals, strict=True):
            yield f'{name}_bucket{{{labels},le="{edge}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum}"
        yield f"{name}_count{{{labels}}} {sum(self.counts)}"


class Metrics:
    """The counters and histograms of a model, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Numbers by label, of each key. A number without a label has the label "".
        self._counts: dict[str, defaultdict[str, float]] = {
            key: defaultdict(int, {} if key in (POSITIONS, FINISH_REASONS) else {"": 0})
            for key, _ in COUNTERS.values()
        }
        first = "vllm:time_to_first_token_seconds", SECONDS, "From the request to its first token."
        between = "vllm:inter_token_latency_seconds", TOKEN_SECONDS, "From token to token."
        last = "vllm:e2e_request_latency_seconds", SECONDS, "From the request to its last token."
        self._first_token, self._between_tokens = Histogram(*first), Histogram(*between)
        self._answers = Histogram(*last)

    def count(self, what: str, by: int = 1) -> None:
        """Count cancelled, rejected or failed requests."""
        with self._lock:
            self._counts[what][""] += by

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count new tokens. seconds: Time since the request's last tokens, or since its arrival."""
        with self._lock:
            self._counts["generated"][""] += count
            if first:
                self._first_token.observe(seconds)
            else:
                self._between_tokens.observe(seconds / count, count)

    def finished(self, result: Result, seconds: float) -> None:
        """Count a request that ended. seconds: Time since its arrival."""
        stats, labels = result.stats, result.labels
        with self._lock:
            self._answers.observe(seconds)
            self._counts[FINISH_REASONS][f'finished_reason="{result.finish_reason}"'] += 1
            for what, by in (
                ("prompt", labels.prompt_tokens),
                ("cached", labels.cached_tokens),
                ("drafted", stats.drafted),
                ("accepted", stats.accepted),
                ("drafts", next(iter(stats.drafted_by_position), 0)),
            ):
                self._counts[what][""] += by
            for position, accepted in enumerate(stats.accepted_by_position):
                self._counts[POSITIONS][f'position="{position}"'] += accepted

    def now(self) -> tuple[Mapping[str, Mapping[str, float]], list[Histogram]]:
        """Return copies of the numbers, by key and label, and of the histograms."""
        histograms = [self._first_token, self._between_tokens, self._answers]
        with self._lock:
            return copy.deepcopy((self._counts, histograms))


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
    labels = [_label(model) for model in models]
    counts, histograms = zip(*(metrics.now() for metrics in models.values()), strict=True)
    lines: list[str] = []
    for name, (number, description) in gauges.items():
        lines += _head(name, "gauge", description)
        by_model = number if isinstance(number, Mapping) else {"": number}
        for model, value in by_model.items():
            lines += _lines(name, model and _label(model), {"": value})
    for name, (key, description) in COUNTERS.items():
        lines += _head(name, "counter", description)
        numbers = [of_model[key] for of_model in counts]
        if name.startswith(VLLM):
            for label, values in zip(labels, numbers, strict=True):
                lines += _lines(name, label, values)
        else:
            total = {one: sum(of.get(one, 0) for of in numbers) for of in numbers for one in of}
            lines += _lines(name, "", total)
    for alike in zip(*histograms, strict=True):
        lines += _head(alike[0].name, "histogram", alike[0].description)
        for label, histogram in zip(labels, alike, strict=True):
            lines += histogram.lines(f"{label},{ENGINE}")
    return "\n".join([*lines, ""])


def _lines(name: str, model: str, values: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each number by label. model: The label of the model, or ""."""
    engine = ENGINE if name.startswith(VLLM) else ""
    for label, value in values.items():
        labels = ",".join(filter(None, [model, engine, label]))
        yield f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def _label(model: str) -> str:
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'model_name="{escaped}"'


def _head(name: str, kind: str, description: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
