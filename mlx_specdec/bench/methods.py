"""What is compared: plain decoding, draft lengths, proposers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..assemble import Pair, stream_generate
from ..decoding.statistics import Statistics
from ..drafters import FREE, drafters, proposer_kind
from ..options import Options

Length = int | Literal["auto"]
Runner = Callable[[Sequence[int]], "Sample"]


@dataclass(frozen=True)
class Sample:
    """One text by one method.

    tokens: ids, an EOS included. counted: how many of them were made in `seconds`; baselines make
    the first one in their prompt pass. rounds: verdicts, a plain step being one; None where nobody
    tells. stats: of our own methods.
    """

    tokens: tuple[int, ...]
    counted: int
    seconds: float
    rounds: int | None = None
    text: str = ""
    stats: Statistics | None = None


@dataclass(frozen=True)
class Method:
    """One way to decode.

    family: who proposes ("plain", "draft", "ngram"), or which program it is ("mlx-lm").
    num_draft: tokens a round, 0 for plain decoding. same_text: whether plain decoding's very
    tokens are promised. in_parts: the same text with every round timed in parts.
    """

    name: str
    family: str
    num_draft: Length
    same_text: bool
    run: Runner
    in_parts: Runner | None = None


def own_methods(
    pair: Pair, options: Options, proposers: Sequence[str], lengths: Sequence[Length]
) -> list[Method]:
    """Plain decoding, then every length of every proposer.

    Without proposers: the draft, else the heads, else lookup; and, if "auto" is among the lengths,
    what `generate` does without flags. Raises OptionError for a proposer that the pair lacks.
    """
    # Methods are handed token ids: the chat template was applied before.
    options = replace(options, system_prompt=None, chat_template_config={})
    own = next(
        (each.name for each in drafters(pair, replace(options, num_draft=1, proposer=None))), FREE
    )
    asked: list[tuple[str, Length]] = [(each, n) for each in proposers or [own] for n in lengths]
    simulated = options.simulated_acceptance is not None
    if not proposers and "auto" in lengths and own != FREE and not simulated:
        asked.append(("auto", "auto"))
    plain = _runner(pair, replace(options, regular=True))
    methods = [Method("plain", "plain", 0, True, plain)]
    for proposer, length in asked:
        each = replace(options, regular=False, proposer=proposer, num_draft=length)
        methods.append(
            Method(
                name="auto" if proposer == length else f"{proposer} {length}",
                family=proposer_kind(drafters(pair, each)),
                num_draft=length,
                same_text=keeps_text(each),
                run=_runner(pair, each),
                in_parts=None if length == "auto" else _runner(pair, each, time_all=True),
            )
        )
    return methods


def keeps_text(options: Options) -> bool:
    """Whether plain decoding's very tokens are promised, not only its distribution."""
    if options.lossy:
        return False
    return options.temperature == 0 or options.rule_name == "coupled"


def _runner(pair: Pair, options: Options, *, time_all: bool = False) -> Runner:
    def run(prompt: Sequence[int]) -> Sample:
        result = stream_generate(pair, prompt, options, time_all=time_all).result()
        seconds = result.stats.seconds
        return Sample(
            tokens=result.tokens,
            counted=len(result.tokens),
            seconds=seconds.draft + seconds.verify + seconds.other,
            rounds=result.stats.rounds,
            text=result.text,
            stats=result.stats,
        )

    return run
