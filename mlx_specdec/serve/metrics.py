"""What the engine has done, counted, in Prometheus' text format.

The names are those of llama.cpp's server and of vLLM, so that tools for either read them; what
neither has is named mlx_specdec.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from ..decoding.run import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Histogram:
    """Counts observations up to each of `edges`, and beyond."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`times` observations of the same value."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += times * value


class Metrics:
    """Told by the engine and by the application, read by whoever asks; any thread may do either."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._accepted_at: Counter[int] = Counter()
        self._reasons: Counter[str] = Counter()
        self._first_token = Histogram(SECONDS)
        self._between_tokens = Histogram(TOKEN_SECONDS)
        self._whole = Histogram(SECONDS)

    def count(self, what: str, by: int = 1) -> None:
        """`what`: steps, cancelled, rejected or failed."""
        with self._lock:
            self._counts[what] += by

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """So many tokens came, so long after the tokens before or, at first, after the request."""
        with self._lock:
            self._counts["generated"] += count
            if first:
                self._first_token.observe(seconds)
            else:
                self._between_tokens.observe(seconds / count, count)

    def finished(self, result: Result, reason: str, seconds: float) -> None:
        """A request has its whole text, so many seconds after it came."""
        stats = result.stats
        with self._lock:
            self._whole.observe(seconds)
            self._reasons[reason] += 1
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
        self,
        model: str,
        running: int,
        waiting: int,
        nbytes: Mapping[str, tuple[int, str]],
    ) -> str:
        """Everything. model: its name, for the labels; running, waiting: requests. nbytes: by name,
        numbers of bytes and what they are."""
        with self._lock:
            lines = self._lines(_escaped(model), running, waiting, nbytes)
            return "\n".join([*lines, ""])

    def _lines(
        self, model: str, running: int, waiting: int, nbytes: Mapping[str, tuple[int, str]]
    ) -> Iterator[str]:
        counts, labels = self._counts, f'model_name="{model}",engine="0"'
        prompt, decoding = counts["prompt_ms"] / 1000, counts["decoding_ms"] / 1000
        plain = [
            ("prompt_tokens_total", counts["prompt"] - counts["cached"], "Prompt tokens read."),
            ("prompt_seconds_total", prompt, "Seconds of reading prompts."),
            ("tokens_predicted_total", counts["generated"], "Tokens generated."),
            ("tokens_predicted_seconds_total", decoding, "Seconds of generating, of all requests."),
            ("n_decode_total", counts["steps"], "Steps of the engine."),
        ]
        for name, value, told in plain:
            yield from _family(f"llamacpp:{name}", "counter", told, {"": value})
        yield from _family("llamacpp:requests_processing", "gauge", "Decoded now.", {"": running})
        yield from _family("llamacpp:requests_deferred", "gauge", "Waiting now.", {"": waiting})
        running_told, waiting_told = "Requests decoded now.", "Requests waiting now."
        yield from _family("vllm:num_requests_running", "gauge", running_told, {labels: running})
        yield from _family("vllm:num_requests_waiting", "gauge", waiting_told, {labels: waiting})
        for name, key in (("prompt_tokens", "prompt"), ("generation_tokens", "generated")):
            told = "Tokens of prompts and answers."
            yield from _family(f"vllm:{name}_total", "counter", told, {labels: counts[key]})
        for name, key in (("queries", "prompt"), ("hits", "cached")):
            told = "Tokens of prompts that were looked for, and that were not read again."
            name = f"vllm:prefix_cache_{name}_total"
            yield from _family(name, "counter", told, {labels: counts[key]})
        for name, (number, told) in nbytes.items():
            yield from _family(f"mlx_specdec:{name}", "gauge", told, {"": number})
        by_reason = {f'{labels},finished_reason="{each}"': n for each, n in self._reasons.items()}
        told = "Requests with a whole answer."
        yield from _family("vllm:request_success_total", "counter", told, by_reason)
        yield from self._speculation("llamacpp:", "")
        yield from self._speculation("vllm:", labels)
        for name, histogram, told in (
            ("time_to_first_token", self._first_token, "From the request to its first token."),
            ("inter_token_latency", self._between_tokens, "From token to token of a request."),
            ("e2e_request_latency", self._whole, "From the request to its last token."),
        ):
            yield from _histogram(f"vllm:{name}_seconds", told, labels, histogram)
        for what, told in (
            ("cancelled", "Requests whose client left or whose time was over."),
            ("rejected", "Requests that found the queue full."),
            ("failed", "Requests that ended with an error of the server."),
        ):
            name = f"mlx_specdec:requests_{what}_total"
            yield from _family(name, "counter", told, {"": counts[what]})

    def _speculation(self, prefix: str, labels: str) -> Iterator[str]:
        name = f"{prefix}spec_decode_num"
        for what, key, told in (
            ("drafts", "drafts", "Rounds with drafted tokens, of each request."),
            ("draft_tokens", "drafted", "Tokens drafted."),
            ("accepted_tokens", "accepted", "Drafted tokens that were accepted."),
        ):
            yield from _family(f"{name}_{what}_total", "counter", told, {labels: self._counts[key]})
        comma = "," if labels else ""
        by_position = {
            f'{labels}{comma}position="{position}"': count
            for position, count in sorted(self._accepted_at.items())
        }
        told = "Accepted tokens by their place in the draft."
        yield from _family(f"{name}_accepted_tokens_per_pos_total", "counter", told, by_position)


def _family(name: str, kind: str, told: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def _histogram(name: str, told: str, labels: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} histogram"
    total = 0
    for edge, count in zip([*histogram.edges, "+Inf"], histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{labels},le="{edge}"}} {total}'
    yield f"{name}_sum{{{labels}}} {histogram.sum}"
    yield f"{name}_count{{{labels}}} {total}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
