"""Counters of the engine in Prometheus' text format, under the names of llama.cpp's server and of
vLLM, so that tools for either can read them."""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate

from ..engine.results import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
COUNTERS = {
    "llamacpp:prompt_tokens_total": ("read", "Prompt tokens read."),
    "llamacpp:prompt_seconds_total": ("prompt_seconds", "Seconds of reading prompts."),
    "llamacpp:tokens_predicted_total": ("generated", "Tokens generated."),
    "llamacpp:tokens_predicted_seconds_total": ("decoding_seconds", "Seconds of generating."),
    "llamacpp:n_decode_total": ("steps", "Steps of the engine."),
    "vllm:prompt_tokens_total": ("prompt", "Tokens of prompts."),
    "vllm:generation_tokens_total": ("generated", "Tokens of answers."),
    "vllm:prefix_cache_queries_total": ("prompt", "Prompt tokens looked for in the cache."),
    "vllm:prefix_cache_hits_total": ("cached", "Prompt tokens that were not read again."),
    "mlx_specdec:requests_cancelled_total": ("cancelled", "Clients that left, or were too late."),
    "mlx_specdec:requests_rejected_total": ("rejected", "Requests that found the queue full."),
    "mlx_specdec:requests_failed_total": ("failed", "Requests that an error here ended."),
    **{
        f"{server}:spec_decode_num_{name}_total": (key, description)
        for server in ("llamacpp", "vllm")
        for name, key, description in (
            ("drafts", "drafts", "Rounds with drafted tokens, of each request."),
            ("draft_tokens", "drafted", "Tokens drafted."),
            ("accepted_tokens", "accepted", "Drafted tokens that were accepted."),
        )
    },
}
"""The key of the count and the description of each counter, by the counter's name."""


class Histogram:
    """The number of observations up to each of `edges`, and above the last one."""

    def __init__(self, edges: tuple[float, ...], description: str) -> None:
        self.edges = edges
        self.description = description
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` observations of the same value."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += times * value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the lines of this histogram in Prometheus' text format, under the given name."""
        yield from _head(name, "histogram", self.description)
        totals = accumulate(self.counts)
        for edge, total in zip([*self.edges, "+Inf"], totals, strict=True):
            yield f'{name}_bucket{{{labels},le="{edge}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum}"
        yield f"{name}_count{{{labels}}} {sum(self.counts)}"


class Metrics:
    """The engine's counters and histograms, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._accepted_at: Counter[int] = Counter()
        self._reasons: Counter[str] = Counter()
        self._first_token = Histogram(SECONDS, "From the request to its first token.")
        self._between_tokens = Histogram(TOKEN_SECONDS, "From token to token of a request.")
        self._answers = Histogram(SECONDS, "From the request to its last token.")

    def count(self, what: str, by: int = 1) -> None:
        """Count steps, or cancelled, rejected or failed requests."""
        with self._lock:
            self._counts[what] += by

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count new tokens. seconds: Time since the request's last tokens, or since its arrival."""
        with self._lock:
            self._counts["generated"] += count
            if first:
                self._first_token.observe(seconds)
            else:
                self._between_tokens.observe(seconds / count, count)

    def finished(self, result: Result, seconds: float) -> None:
        """Count a request that ended. seconds: Time since its arrival."""
        stats, labels = result.stats, result.labels
        with self._lock:
            self._answers.observe(seconds)
            self._reasons[result.finish_reason] += 1
            for what, by in (
                ("prompt", labels.prompt_tokens),
                ("cached", labels.cached_tokens),
                ("read", labels.prompt_tokens - labels.cached_tokens),
                ("drafted", stats.drafted),
                ("accepted", stats.accepted),
                ("drafts", next(iter(stats.drafted_by_position), 0)),
                ("prompt_seconds", stats.seconds.prompt),
                ("decoding_seconds", stats.seconds.decoding),
            ):
                self._counts[what] += by
            self._accepted_at.update(dict(enumerate(stats.accepted_by_position)))

    def as_text(
        self, model: str, gauges: Mapping[str, tuple[float | Mapping[str, float], str]]
    ) -> str:
        """Return all metrics. gauges: Further numbers, or numbers by model, and their descriptions,
        by name."""
        labels = f'{_label(model)},engine="0"'
        lines: list[str] = []

        def add(name: str, kind: str, description: str, values: Mapping[str, float]) -> None:
            lines.extend(_head(name, kind, description))
            vllm = [labels] if name.startswith("vllm") else []
            for label, value in values.items():
                joined = ",".join([*vllm, *filter(None, [label])])
                lines.append(f"{name}{{{joined}}} {value}" if joined else f"{name} {value}")

        with self._lock:
            for name, (number, description) in gauges.items():
                by_model = number if isinstance(number, Mapping) else {"": number}
                values = {of and _label(of): value for of, value in by_model.items()}
                add(name, "gauge", description, values)
            for name, (key, description) in COUNTERS.items():
                add(name, "counter", description, {"": self._counts[key]})
            places = {f'position="{at}"': n for at, n in sorted(self._accepted_at.items())}
            for server in ("llamacpp", "vllm"):
                name = f"{server}:spec_decode_num_accepted_tokens_per_pos_total"
                add(name, "counter", "Accepted tokens by their place in the draft.", places)
            reasons = {f'finished_reason="{reason}"': n for reason, n in self._reasons.items()}
            name = "vllm:request_success_total"
            add(name, "counter", "Requests with a whole answer.", reasons)
            lines += self._first_token.lines("vllm:time_to_first_token_seconds", labels)
            lines += self._between_tokens.lines("vllm:inter_token_latency_seconds", labels)
            lines += self._answers.lines("vllm:e2e_request_latency_seconds", labels)
        return "\n".join([*lines, ""])


def _label(model: str) -> str:
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'model_name="{escaped}"'


def _head(name: str, kind: str, description: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
