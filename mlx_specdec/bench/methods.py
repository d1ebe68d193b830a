"""What is compared, plain decoding, draft lengths and proposers, and the passes timed beside."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from ..assemble import Pair, stream_generate
from ..costs.passes import Clock, PassTimer, opened
from ..decoding.statistics import Statistics
from ..decoding.stopwatch import Timed
from ..drafters import FREE, drafters, proposer_kind
from ..errors import PromptError
from ..models.base import check_prompt
from ..options import Options

ALWAYS_TIMED = 9
"""Passes over 1 .. ALWAYS_TIMED tokens are always measured: that is where V bends."""
TURNS = 20
"""Fewer turns than this leave medians that jump."""

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
                in_parts=None if length == "auto" else _runner(pair, each, timed="all"),
            )
        )
    return methods


def keeps_text(options: Options) -> bool:
    """Whether plain decoding's very tokens are promised, not only its distribution."""
    if options.lossy:
        return False
    return options.temperature == 0 or options.rule_name == "coupled"


def any_token(pair: Pair) -> int:
    """One that the pair has, to try a program out with."""
    return min(pair.vocabulary - 1, 2)


def room(pair: Pair, options: Options, prompt: Sequence[int]) -> int:
    """How many tokens a text may have. Raises PromptError where the model takes none."""
    longest = pair.target.max_length
    check_prompt(prompt, pair.target.vocabulary, longest)
    prefix = len(pair.target.prefix(prompt))
    if longest is not None and prefix >= longest:
        raise PromptError(f"the prompt has {prefix} tokens and the model takes {longest}")
    return min(options.max_tokens, sys.maxsize if longest is None else longest - prefix)


def _runner(pair: Pair, options: Options, *, timed: Timed = "wanted") -> Runner:
    def run(prompt: Sequence[int]) -> Sample:
        result = stream_generate(pair, prompt, options, timed=timed).result()
        seconds = result.stats.seconds
        return Sample(
            tokens=result.tokens,
            counted=len(result.tokens),
            seconds=seconds.decoding,
            rounds=result.stats.rounds,
            text=result.text,
            stats=result.stats,
        )

    return run


def pass_timer(
    pair: Pair, prompt: Sequence[int], lengths: Sequence[Length], clock: Clock = time.perf_counter
) -> PassTimer:
    """Times passes behind a prompt, those of rounds with `lengths` drafted tokens among them.

    Turns belong between the texts that the costs are held against, so that both see the same
    machine. A draft that cannot take the prompt is left out, as it abstains while decoding;
    raises PromptError where the target cannot.
    """
    draft = None
    if pair.draft is not None:
        fed = prompt if pair.translation is None else pair.translation.feed(prompt)
        with suppress(PromptError):
            draft = opened(pair.draft, fed)
    sizes = sorted({*range(1, ALWAYS_TIMED + 1), *(n + 1 for n in lengths if n != "auto")})
    return PassTimer(opened(pair.target, prompt), sizes=sizes, draft=draft, clock=clock)
