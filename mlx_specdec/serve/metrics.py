"""Counters of the engine in Prometheus' text format.

The names are those of llama.cpp's server and of vLLM, so that tools for either can read them; what
neither has is named mlx_specdec.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from ..engine.request import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
Family = tuple[str, str, str, Mapping[str, float]]
"""A metric: its name, its type, its description, and its values by their labels."""


REQUESTS = {
    "cancelled": "Requests whose client left or whose time was over.",
    "rejected": "Requests that found the queue full.",
    "failed": "Requests that ended with an error of the server.",
}
DRAFTS = (
    ("drafts", "drafts", "Rounds with drafted tokens, of each request."),
    ("draft_tokens", "drafted", "Tokens drafted."),
    ("accepted_tokens", "accepted", "Drafted tokens that were accepted."),
)


class Histogram:
    """Counts observations up to each of `edges`, and beyond."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` observations of the same value."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += times * value


class Metrics:
    """Counts what the engine does. Any thread may write and read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._accepted_at: Counter[int] = Counter()
        self._reasons: Counter[str] = Counter()
        self._first_token = Histogram(SECONDS)
        self._between_tokens = Histogram(TOKEN_SECONDS)
        self._whole = Histogram(SECONDS)

    def count(self, what: str, by: int = 1) -> None:
        """Count steps, or cancelled, rejected or failed requests."""
        with self._lock:
            self._counts[what] += by

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count new tokens. seconds: since the request's last tokens; where these are its first
        ones, since the request came."""
        with self._lock:
            self._counts["generated"] += count
            if first:
                self._first_token.observe(seconds)
            else:
                self._between_tokens.observe(seconds / count, count)

    def finished(self, result: Result, seconds: float) -> None:
        """Count a request that ended. seconds: since it came."""
        stats = result.stats
        with self._lock:
            self._whole.observe(seconds)
            self._reasons[result.finish_reason] += 1
            self._counts["prompt"] += result.labels.prompt_tokens
            self._counts["cached"] += result.labels.cached_tokens
            self._counts["prompt_ms"] += round(1000 * stats.seconds.prompt)
            self._counts["decoding_ms"] += round(1000 * stats.seconds.decoding)
            self._counts["drafted"] += stats.drafted
            self._counts["accepted"] += stats.accepted
            self._counts["drafts"] += next(iter(stats.drafted_by_position), 0)
            for position, count in enumerate(stats.accepted_by_position):
                self._accepted_at[position] += count

    def as_text(
        self, model: str, running: int, waiting: int, nbytes: Mapping[str, tuple[int, str]]
    ) -> str:
        """Return all metrics. model: its name, for the labels. running, waiting: requests. nbytes:
        numbers of bytes and their descriptions, by name."""
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'model_name="{escaped}",engine="0"'
        lines = []
        with self._lock:
            for name, kind, description, values in self._plain(labels, running, waiting, nbytes):
                lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
                lines += [
                    f"{name}{{{each}}} {value}" if each else f"{name} {value}"
                    for each, value in values.items()
                ]
            for name, histogram, description in (
                ("time_to_first_token", self._first_token, "From the request to its first token."),
                ("inter_token_latency", self._between_tokens, "From token to token of a request."),
                ("e2e_request_latency", self._whole, "From the request to its last token."),
            ):
                lines += _histogram(f"vllm:{name}_seconds", description, labels, histogram)
        return "\n".join([*lines, ""])

    def _plain(
        self, labels: str, running: int, waiting: int, nbytes: Mapping[str, tuple[int, str]]
    ) -> list[Family]:
        """Return all metrics but the histograms."""
        counts = self._counts
        read, generated = counts["prompt"] - counts["cached"], counts["generated"]
        prompt, decoding = counts["prompt_ms"] / 1000, counts["decoding_ms"] / 1000
        generating = "Seconds of generating, of all requests."
        both = "Tokens of prompts and answers."
        lookups = "Tokens of prompts that were looked for, and that were not read again."
        plain: list[tuple[str, str, str, float]] = [
            ("llamacpp:prompt_tokens_total", "counter", "Prompt tokens read.", read),
            ("llamacpp:prompt_seconds_total", "counter", "Seconds of reading prompts.", prompt),
            ("llamacpp:tokens_predicted_total", "counter", "Tokens generated.", generated),
            ("llamacpp:tokens_predicted_seconds_total", "counter", generating, decoding),
            ("llamacpp:n_decode_total", "counter", "Steps of the engine.", counts["steps"]),
            ("llamacpp:requests_processing", "gauge", "Decoded now.", running),
            ("llamacpp:requests_deferred", "gauge", "Waiting now.", waiting),
            ("vllm:num_requests_running", "gauge", "Requests decoded now.", running),
            ("vllm:num_requests_waiting", "gauge", "Requests waiting now.", waiting),
            ("vllm:prompt_tokens_total", "counter", both, counts["prompt"]),
            ("vllm:generation_tokens_total", "counter", both, generated),
            ("vllm:prefix_cache_queries_total", "counter", lookups, counts["prompt"]),
            ("vllm:prefix_cache_hits_total", "counter", lookups, counts["cached"]),
            *(
                (f"mlx_specdec:{name}", "gauge", description, number)
                for name, (number, description) in nbytes.items()
            ),
            *(
                (f"mlx_specdec:requests_{what}_total", "counter", description, counts[what])
                for what, description in REQUESTS.items()
            ),
            *(
                (f"{server}:spec_decode_num_{name}_total", "counter", description, counts[key])
                for server in ("llamacpp", "vllm")
                for name, key, description in DRAFTS
            ),
        ]
        families: list[Family] = [
            (name, kind, description, {labels if name.startswith("vllm") else "": value})
            for name, kind, description, value in plain
        ]
        for name, before in (("llamacpp", ""), ("vllm", f"{labels},")):
            name = f"{name}:spec_decode_num_accepted_tokens_per_pos_total"
            by_position = sorted(self._accepted_at.items())
            values = {f'{before}position="{at}"': count for at, count in by_position}
            description = "Accepted tokens by their place in the draft."
            families.append((name, "counter", description, values))
        reasons = {f'{labels},finished_reason="{each}"': n for each, n in self._reasons.items()}
        description = "Requests with a whole answer."
        return [*families, ("vllm:request_success_total", "counter", description, reasons)]


def _histogram(name: str, description: str, labels: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} histogram"
    total = 0
    for edge, count in zip([*histogram.edges, "+Inf"], histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{labels},le="{edge}"}} {total}'
    yield f"{name}_sum{{{labels}}} {histogram.sum}"
    yield f"{name}_count{{{labels}}} {total}"
