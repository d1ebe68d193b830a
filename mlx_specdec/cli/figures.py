"""The figures of a generation, in lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..decoding.draft_length import Change
    from ..decoding.run import Result


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
    second = "plain decoding"
    if labels.proposer != "none":
        rate = f" ({stats.acceptance_rate:.0%})" if stats.acceptance_rate is not None else ""
        second = f"{stats.accepted} of {stats.drafted} draft tokens accepted{rate} in "
        second += f"{stats.rounds} rounds, rule {labels.rule}"
        if labels.lossy:
            second += f" (lossy, delta {labels.delta:g})" if labels.delta > 0 else " (lossy)"
    return f"{first}\n{second}\n{_around(result)}"


def _around(result: Result) -> str:
    """What was not decoding: the prompt, the loading, the memory and the machine."""
    stats, count = result.stats, result.labels.prompt_tokens
    seconds = stats.seconds.prompt
    return (
        f"prompt: {_pace(count, seconds, count / seconds if seconds else None)}; "
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
