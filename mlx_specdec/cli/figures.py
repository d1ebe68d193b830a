"""The figures of a generation, in lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..batch.run import BatchRun, Figures
    from ..decoding.draft_length import Change
    from ..decoding.run import Labels, Result
    from ..decoding.statistics import Statistics


def summary(result: Result) -> str:
    """The statistics of one text in three lines."""
    stats, labels = result.stats, result.labels
    first = (
        f"{_pace(len(result.tokens), stats.seconds.decoding, stats.tokens_per_second)}; "
        f"finish reason: {result.finish_reason}"
    )
    if labels.simulated_acceptance is not None:
        first = (
            f"simulated acceptance probability {labels.simulated_acceptance:g}, no text: {first}"
        )
    return f"{first}\n{_drafts(stats, labels)}\n{_around(result)}"


def batch_summary(run: BatchRun) -> str:
    """The statistics of a run over a file in three lines; of earlier runs nothing is known."""
    made, many = run.figures, run.many
    together = f"up to {many.batch_size} texts in a pass"
    if many.why_not is not None:
        together = f"one text at a time: {many.why_not}"
    first = f"{made.texts} texts, {_pace(made.tokens, made.seconds, made.tokens_per_second)}"
    second = "nothing was decoded" if made.labels is None else _drafts(made, made.labels)
    return f"{first}\n{second}\n{together}"


def _drafts(counted: Statistics | Figures, labels: Labels) -> str:
    if labels.proposer == "none":
        return "plain decoding"
    rate = f" ({counted.accepted / counted.drafted:.0%})" if counted.drafted else ""
    told = f"{counted.accepted} of {counted.drafted} draft tokens accepted{rate} in "
    told += f"{counted.rounds} rounds, rule {labels.rule}"
    if labels.lossy:
        told += f" (lossy, delta {labels.delta:g})" if labels.delta > 0 else " (lossy)"
    return told


def _around(result: Result) -> str:
    """What was not decoding: the prompt, the loading, the memory and the machine."""
    stats, labels = result.stats, result.labels
    count, seconds = labels.prompt_tokens - labels.cached_tokens, stats.seconds.prompt
    known = f" ({labels.cached_tokens} more were known)" if labels.cached_tokens else ""
    return (
        f"prompt: {_pace(count, seconds, count / seconds if seconds else None)}{known}; "
        f"loaded in {stats.seconds.load:.2f} s; "
        f"peak memory {stats.peak_memory_bytes / 1e9:.3f} GB; {stats.device}, BLAS {stats.blas}"
    )


def _pace(tokens: int, seconds: float, speed: float | None) -> str:
    return f"{tokens} tokens in {seconds:.2f} s" + (f", {speed:.1f} tokens/s" if speed else "")


def lengths(changes: Sequence[Change], result: Result) -> str:
    """Which draft lengths were chosen when, and what they promised."""
    lines = [
        f"from round {change.round} on: {change.length} draft tokens"
        + (f" by {change.source}, " if change.source else ", ")
        + (f"expected speedup {change.speed:.2f}" if change.length else "plain decoding")
        for change in changes
    ]
    drafted = result.stats.drafted_by_position
    if drafted:
        rates = zip(result.stats.accepted_by_position, drafted, strict=True)
        accepted = " ".join(f"{kept / count:.2f}" for kept, count in rates)
        lines.append(f"accepted by position: {accepted}")
    return "\n".join(lines or ["the number of draft tokens was fixed"])
