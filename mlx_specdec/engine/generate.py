"""One sequence from a pair and its options: context, proposer, rule and noise come together here.

It knows every package below, and the names of the rules; terminals are above it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from .. import process as blas
from ..decoding.loop import Decoding
from ..decoding.prompt import PromptReader
from ..decoding.run import Environment, Labels, Result, Run
from ..decoding.sequence import Batch
from ..decoding.sequence import Sequence as Decoded
from ..decoding.statistics import Recorder
from ..decoding.stop_criteria import StopCriteria
from ..decoding.stopwatch import Stopwatch, Timed
from ..draft_length.auto_length import AutoLength
from ..draft_length.length import DraftLength, FixedLength
from ..interfaces import Model, NoiseSource, Progress, Proposer, Rule
from ..interfaces.reusable import NOTHING, Beginning
from ..interfaces.rounds import RoundListener
from ..options import Options
from ..proposers.drafter import Drafter
from ..sampling.distribution import Distribution
from ..sampling.noise import CoupledNoise, IndependentNoise, SilentNoise
from ..testing import checked
from ..text.chat import Messages
from ..text.stream import StopStrings, TextStream
from ..verification.rules import (
    BlockRule,
    Coupled,
    ForcedAcceptance,
    LenientGreedy,
    TokenRule,
    TypicalRule,
)
from .drafters import (
    Trials,
    device_name,
    drafters,
    keep_costs,
    make_draft_length,
    make_proposer,
    proposer_kind,
)
from .pair import Pair
from .prepare import checked_options, prepared
from .prompt_cache import PromptCache

DEBUG = "MLX_SPECDEC_DEBUG"
"""Environment variable: compare every context with the committed tokens after every round."""


def stream_generate(
    pair: Pair,
    prompt: str | Sequence[int] | Messages,
    options: Options | None = None,
    *,
    proposer: Proposer | None = None,
    rule: Rule | None = None,
    draft_length: DraftLength | None = None,
    progress: Progress | None = None,
    timed: Timed = "wanted",
    cache: PromptCache | None = None,
) -> Run:
    """Start one sequence: iterate over the returned Run for its emissions, ask it for the result.

    prompt: text, messages for the chat template, or token ids as they are. proposer, rule,
    draft_length: the caller's own in the place of what the options name. progress: of reading it.
    timed: which rounds are timed in parts, as decoding.stopwatch.Timed says; it costs overlap, and
    the statistics have no seconds of drafting and verifying without it. cache: what was computed of
    earlier texts is not computed again, and what is computed here is kept; the text is the same. It
    is not used for a target whose rows disagree, see models.base.
    Raises PromptError, OptionError.
    """
    options = checked_options(options)
    mx.reset_peak_memory()
    ids, pair, options = prepared(pair, prompt, options)
    target: Model = pair.target
    shadows: list[RoundListener] = []
    if cache is not None and not pair.target.rows_agree:
        cache = None
    if proposer is not None and not pair.target.rows_agree:
        proposer, options = None, replace(options, regular=True)
    if os.environ.get(DEBUG):
        target, draft, shadows = checked(pair.target, pair.draft, pair.translation)
        pair = replace(pair, draft=draft)
    chosen = () if proposer is not None else drafters(pair, options)
    lengths = draft_length or make_draft_length(pair, chosen, options)
    if proposer is not None and draft_length is None:
        lengths = AutoLength() if options.num_draft == "auto" else FixedLength(options.num_draft)
    proposer = proposer or make_proposer(chosen, options, lengths)
    recorder, trials = Recorder(), Trials(pair, chosen, options)
    watch = Stopwatch(
        [recorder, lengths, trials, *shadows], timed=timed, wanted=lambda: lengths.wants_parts
    )
    known = NOTHING if cache is None else cache.beginning(target, ids, proposer)
    verifying = rule or make_rule(options)
    decoding = make_decoding(
        pair, target, ids, options, proposer, verifying, lengths, watch, progress, known
    )
    labels = make_labels(pair, options, chosen, len(ids), known.cached_tokens)
    if not chosen and proposer is not None:
        labels = replace(labels, proposer=type(proposer).__name__, num_draft=options.num_draft)
    if rule is not None:
        labels = replace(labels, rule=type(rule).__name__)

    def learned() -> None:
        keep_costs(pair, chosen, options, lengths)
        trials.tell()

    def keep() -> None:
        if cache is not None:
            cache.keep(ids, decoding.sequences[0].committed, decoding.memories(0))

    return Run(
        decoding,
        recorder,
        labels,
        environment(pair),
        watch.clock,
        learned=learned,
        changes=lambda: lengths.changes,
        keep=keep,
        forget=lambda: None if cache is None else cache.clear(),
    )


def generate(
    pair: Pair, prompt: str | Sequence[int] | Messages, options: Options | None = None
) -> Result:
    """The whole text at once; see `stream_generate`."""
    return stream_generate(pair, prompt, options).result()


def make_decoding(
    pair: Pair,
    target: Model,
    ids: Sequence[int],
    options: Options,
    proposer: Proposer | None,
    rule: Rule,
    lengths: DraftLength,
    watch: Stopwatch,
    progress: Progress | None = None,
    known: Beginning = NOTHING,
) -> Decoding:
    """One sequence that has read nothing but what is known of its prompt."""
    context, sequence = target.open(ids, known.target), make_sequence(pair, ids, options)
    step = options.prefill_step_size
    return Decoding(
        target=context,
        proposer=proposer,
        rule=rule,
        batch=Batch([sequence]),
        draft_length=lengths,
        reader=PromptReader(
            context, [sequence.committed], [ids], proposer, progress, step, [known.proposer]
        ),
        watch=watch,
    )


def make_sequence(
    pair: Pair,
    ids: Sequence[int],
    options: Options,
    top_logprobs: int | None = None,
    shown: Mapping[int, str] | None = None,
) -> Decoded:
    """What is decoded for a prompt of the target. top_logprobs: as Sequence has it. shown: as
    TextStream has it."""
    prefix, sampling = pair.target.prefix(ids), options.sampling
    constraint = pair.constraint(options.constraint, sampling.logit_bias)
    return Decoded(
        prefix,
        Distribution(sampling, pair.vocabulary, ids, constraint),
        _noise(pair, ids, options),
        _stop_criteria(pair, options, len(prefix), shown),
        top_logprobs,
    )


def make_labels(
    pair: Pair,
    options: Options,
    chosen: Sequence[Drafter],
    prompt_tokens: int,
    cached_tokens: int = 0,
) -> Labels:
    """How a completion is named in its result."""
    return Labels(
        model=pair.name,
        draft_model=pair.draft_name if any(each.identity for each in chosen) else None,
        proposer=proposer_kind(chosen),
        rule=options.rule_name,
        lossy=options.lossy,
        delta=options.delta,
        seed=options.seed,
        num_draft=options.num_draft if chosen else 0,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        simulated_acceptance=options.simulated_acceptance,
    )


def environment(pair: Pair) -> Environment:
    """What figures are measured on, here and now."""
    return Environment(
        load_seconds=pair.load_seconds,
        device=device_name(),
        blas=blas.name(),
        peak_memory=mx.get_peak_memory,
    )


def make_rule(options: Options) -> Rule:
    """The rule that the options name."""
    if options.simulated_acceptance is not None:
        return ForcedAcceptance(options.simulated_acceptance, options.seed)
    if options.rule_name == "lenient":
        return LenientGreedy(options.delta)
    if options.rule_name == "typical":
        return TypicalRule(options.posterior_threshold, options.posterior_alpha)
    if options.rule_name == "coupled" or options.temperature == 0:
        return Coupled()
    return BlockRule() if options.rule_name == "block" else TokenRule(options.delta)


def _noise(pair: Pair, prompt: Sequence[int], options: Options) -> NoiseSource:
    if options.temperature == 0:
        return SilentNoise()
    if options.rule_name in ("coupled", "simulated"):
        return CoupledNoise(options.seed, pair.vocabulary, prompt)
    return IndependentNoise(options.seed, pair.vocabulary, prompt)


def _stop_criteria(
    pair: Pair, options: Options, prefix: int, shown: Mapping[int, str] | None
) -> StopCriteria:
    longest = pair.target.max_length
    return StopCriteria(
        # A text that only measures the loop goes on to the end.
        eos=pair.eos_token_ids if options.simulated_acceptance is None else frozenset(),
        max_tokens=min(options.max_tokens, sys.maxsize if longest is None else longest - prefix),
        stream=TextStream(pair.tokenizer, shown),
        stops=StopStrings(tuple(options.stop)) if options.stop else None,
    )
