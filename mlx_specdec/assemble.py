"""One sequence from a pair and its options: context, proposer, rule and noise come together here.

It knows every package below, and the names of the rules; terminals are above it.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx

from . import blas
from .contracts import Model, NoiseSource, Progress, Proposer, Rule
from .decoding.auto_length import AutoLength
from .decoding.draft_length import DraftLength, FixedLength
from .decoding.loop import Decoding
from .decoding.prompt import PromptReader
from .decoding.rounds import RoundListener
from .decoding.run import Environment, Labels, Result, Run
from .decoding.sequence import Batch
from .decoding.sequence import Sequence as Decoded
from .decoding.statistics import Recorder
from .decoding.stop_criteria import StopCriteria
from .decoding.stopwatch import Stopwatch, Timed
from .drafters import (
    Trials,
    device_name,
    drafters,
    keep_costs,
    make_draft_length,
    make_proposer,
    proposer_kind,
)
from .drafting.drafter import Drafter
from .errors import OptionError
from .options import Options
from .pair import Pair as Pair
from .pair import load as load
from .pair import with_documents as with_documents
from .pair import with_draft_model as with_draft_model
from .sampling.distribution import Distribution
from .sampling.noise import CoupledNoise, IndependentNoise, SilentNoise
from .shadow import checked
from .text.chat import Messages, check_settings
from .text.stream import StopStrings, TextStream
from .text.tokenizer import prompt_ids
from .verification.block import BlockRule
from .verification.coupled import Coupled, LenientGreedy
from .verification.forced import ForcedAcceptance
from .verification.rejection import TokenRule
from .verification.typical import TypicalRule

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
) -> Run:
    """Start one sequence: iterate over the returned Run for its emissions, ask it for the result.

    prompt: text, messages for the chat template, or token ids as they are. proposer, rule,
    draft_length: the caller's own in the place of what the options name. progress: of reading it.
    timed: which rounds are timed in parts, as decoding.stopwatch.Timed says; it costs overlap, and
    the statistics have no seconds of drafting and verifying without it.
    Raises PromptError, OptionError.
    """
    options = checked_options(options)
    mx.reset_peak_memory()
    ids, pair, options = prepared(pair, prompt, options)
    target: Model = pair.target
    shadows: list[RoundListener] = []
    if proposer is not None and not pair.target.rows_agree:
        proposer, options = None, replace(options, regular=True)
    if os.environ.get(DEBUG):
        target, pair, shadows = checked(pair)
    chosen = () if proposer is not None else drafters(pair, options)
    lengths = draft_length or make_draft_length(pair, chosen, options)
    if proposer is not None and draft_length is None:
        lengths = AutoLength() if options.num_draft == "auto" else FixedLength(options.num_draft)
    proposer = proposer or make_proposer(chosen, options, lengths)
    recorder, trials = Recorder(), Trials(pair, chosen, options)
    watch = Stopwatch(
        [recorder, lengths, trials, *shadows], timed=timed, wanted=lambda: lengths.wants_parts
    )
    decoding = make_decoding(
        pair, target, ids, options, proposer, rule or make_rule(options), lengths, watch, progress
    )
    labels = make_labels(pair, options, chosen, len(ids))
    if not chosen and proposer is not None:
        labels = replace(labels, proposer=type(proposer).__name__, num_draft=options.num_draft)
    if rule is not None:
        labels = replace(labels, rule=type(rule).__name__)

    def learned() -> None:
        keep_costs(pair, chosen, options, lengths)
        trials.tell()

    return Run(
        decoding,
        recorder,
        labels,
        environment(pair),
        watch.clock,
        learned=learned,
        changes=lambda: lengths.changes,
    )


def generate(
    pair: Pair, prompt: str | Sequence[int] | Messages, options: Options | None = None
) -> Result:
    """The whole text at once; see `stream_generate`."""
    return stream_generate(pair, prompt, options).result()


def encode(pair: Pair, prompt: str | Sequence[int] | Messages, options: Options) -> list[int]:
    """Token ids of a prompt; see `text.tokenizer.prompt_ids`."""
    if isinstance(prompt, str) and prompt.strip():
        prompt = missing_prefix(pair, prompt, options) + prompt
    return prompt_ids(
        pair.tokenizer,
        prompt,
        chat_template=options.chat_template,
        system_prompt=options.system_prompt,
        chat_settings=options.chat_template_config,
    )


def missing_prefix(pair: Pair, prompt: str, options: Options) -> str:
    """What `encode` puts before a prompt that lacks the task's prefix which the target's
    config.json asks for; mostly nothing."""
    wanted = options.chat_template and not prompt.startswith(pair.task_prefix.rstrip())
    return pair.task_prefix if wanted else ""


def prepared(
    pair: Pair, prompt: str | Sequence[int] | Messages, options: Options
) -> tuple[list[int], Pair, Options]:
    """Token ids of a prompt, and pair and options with what its options ask of the model.

    Warns of a prompt that is longer than the model has learned. Raises PromptError, OptionError.
    """
    pair, options = for_model(pair, options)
    ids = encode(pair, prompt, options)
    if caution := pair.target.caution(len(ids)):
        warnings.warn(caution, stacklevel=3)
    return ids, pair, options


def checked_options(options: Options | None) -> Options:
    """The defaults for None. Raises OptionError for what are no Options."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise OptionError(f"options must be made by Options(...), not be {options!r:.80}")
    return options


def for_model(pair: Pair, options: Options) -> tuple[Pair, Options]:
    """Pair and options with what the options ask of the model, whatever the prompt.

    Raises OptionError for what the model does not have.
    """
    _check_chat(pair, options)
    _check_bias(pair, options)
    pair = _with_extra_eos(pair, options)
    pair.constraint(options.constraint)
    return pair, _with_special_tokens(pair, options)


def _check_chat(pair: Pair, options: Options) -> None:
    """Raises OptionError for settings of a chat template that none takes."""
    check_settings(options.chat_template_config)
    asked = options.system_prompt is not None or options.chat_template_config
    if asked and not pair.tokenizer.has_chat_template:
        raise OptionError(
            "system-prompt and chat-template-config are for a chat template, and this model has "
            "none: leave them out"
        )


def _with_extra_eos(pair: Pair, options: Options) -> Pair:
    """Raises OptionError for a token that the model does not have."""
    if not options.extra_eos_token:
        return pair
    ids = {piece: id for id, piece in enumerate(pair.tokenizer.pieces())}
    extra = set()
    for token in map(str, cast(tuple[str | int, ...], options.extra_eos_token)):
        id = int(token) if token.isascii() and token.isdigit() else ids.get(token, -1)
        if not 0 <= id < pair.vocabulary:
            raise OptionError(f"extra-eos-token: the model has no token {token!r:.80}")
        extra.add(id)
    return replace(pair, eos_token_ids=pair.eos_token_ids | extra)


def _with_special_tokens(pair: Pair, options: Options) -> Options:
    """As mlx-lm has it, XTC excludes neither line ends nor what ends a text."""
    if options.xtc_probability == 0 or options.xtc_special_tokens is not None:
        return options
    special = {*pair.tokenizer.encode("\n"), *pair.eos_token_ids}
    return replace(options, xtc_special_tokens=tuple(sorted(special)))


def _check_bias(pair: Pair, options: Options) -> None:
    """Raises OptionError where every token is banned, and for ids that texts do not have."""
    beyond = max(options.logit_bias, default=0)
    if beyond >= pair.vocabulary:
        raise OptionError(
            f"logit-bias: there is no token {beyond}, the model has {pair.vocabulary:,} tokens"
        )
    banned = sum(bias == -math.inf for bias in options.logit_bias.values())
    if banned >= pair.vocabulary:
        raise OptionError("logit-bias bans every token: leave one that may be written")


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
) -> Decoding:
    """One sequence that has read nothing."""
    context, sequence = target.open(ids), make_sequence(pair, ids, options)
    return Decoding(
        target=context,
        proposer=proposer,
        rule=rule,
        batch=Batch([sequence]),
        draft_length=lengths,
        reader=PromptReader(
            context, [sequence.committed], [ids], proposer, progress, options.prefill_step_size
        ),
        watch=watch,
    )


def make_sequence(
    pair: Pair, ids: Sequence[int], options: Options, top_logprobs: int | None = None
) -> Decoded:
    """What is decoded for a prompt of the target. top_logprobs: as Sequence has it."""
    prefix = pair.target.prefix(ids)
    return Decoded(
        prefix,
        Distribution(options.sampling, pair.vocabulary, ids, pair.constraint(options.constraint)),
        _noise(pair, ids, options),
        _stop_criteria(pair, options, len(prefix)),
        top_logprobs,
    )


def make_labels(
    pair: Pair, options: Options, chosen: Sequence[Drafter], prompt_tokens: int
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


def _stop_criteria(pair: Pair, options: Options, prefix: int) -> StopCriteria:
    longest = pair.target.max_length
    return StopCriteria(
        # A text that only measures the loop goes on to the end.
        eos=pair.eos_token_ids if options.simulated_acceptance is None else frozenset(),
        max_tokens=min(options.max_tokens, sys.maxsize if longest is None else longest - prefix),
        stream=TextStream(pair.tokenizer),
        stops=StopStrings(tuple(options.stop)) if options.stop else None,
    )
