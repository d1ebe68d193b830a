"""One text from a pair and its options: context, proposer, rule and noise come together here.

Knows every package below, and the names of the rules. Knows nothing of terminals.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import blas
from .contracts import NoiseSource, Progress, Proposer, Rule
from .costs import cache as cost_cache
from .decoding.draft_length import DraftLength, Survey
from .decoding.ending import Ending
from .decoding.loop import Check, Decoding
from .decoding.run import Labels, Result, Run, Surroundings
from .decoding.statistics import Recorder
from .draft_lengths import cost_key, device_name, keep_costs, make_draft_length
from .errors import OptionError, PromptError
from .models.checked import CheckedModel
from .models.loading import load_model
from .options import Options
from .pair import Pair as Pair
from .pair import load as load
from .pair import with_documents as with_documents
from .proposers import make_proposer, most_drafted, proposer_kind, sources
from .sampling.law import Law
from .sampling.noise import CoupledNoise, IndependentNoise, SilentNoise
from .text.stream import StopStrings, TextStream
from .verification.block import BlockRule
from .verification.coupled import Coupled, LenientGreedy
from .verification.forced import ForcedAcceptance
from .verification.rejection import TokenRule
from .verification.typical import TypicalRule

DEBUG = "MLX_SPECDEC_DEBUG"
"""Environment variable: compare every context with the committed tokens after every round."""


def stream_generate(
    pair: Pair,
    prompt: str | Sequence[int],
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    time_all: bool = False,
) -> Run:
    """Start one text: iterate over the returned Run for its emissions, ask it for the result.

    prompt: text, or token ids that are taken as they are. progress: of a long prompt.
    time_all: time every speculative round in parts, at the price of overlap.
    Raises PromptError, OptionError.
    """
    options = options or Options()
    if os.environ.get(DEBUG):
        pair, check = _checked(pair)
    else:
        check = None
    ids = encode(pair, prompt, options)
    recorder = Recorder(time_all=time_all)
    started = recorder.clock()
    lengths = make_draft_length(pair, options)
    proposer = make_proposer(pair, options, lengths)
    decoding = _decoding(pair, ids, options, proposer, lengths, recorder, check, progress)
    kind = proposer_kind(pair, options)
    labels = Labels(
        model=pair.name,
        draft_model=pair.draft_name if "draft" in sources(pair, options) else None,
        proposer=kind,
        rule=options.rule_name,
        lossy=options.lossy,
        delta=options.delta,
        seed=options.seed,
        num_draft=options.num_draft if proposer is not None else 0,
        prompt_tokens=len(ids),
        simulated_acceptance=options.simulated_acceptance,
    )
    around = Surroundings(
        load_seconds=pair.load_seconds,
        prompt_seconds=recorder.clock() - started,
        device=device_name(),
        blas=blas.name(),
        peak_memory=mx.get_peak_memory,
    )
    return Run(
        decoding,
        recorder,
        labels,
        around,
        learned=lambda: keep_costs(pair, options, lengths),
        changes=lambda: lengths.changes,
    )


def calibrate(
    pair: Pair, *, temperature: float = 0.0, turns: int = 8, progress: Progress | None = None
) -> dict[int, float]:
    """Measure what a round of 1 .. 16 drafted tokens costs, in plain steps, and keep it for auto.

    turns: how often each length is measured; medians count. Raises OptionError without a draft.
    """
    options = Options(max_tokens=sys.maxsize, num_draft="auto", temperature=temperature)
    endless = replace(pair, eos_token_ids=frozenset())
    own = [source for source in sources(pair, options) if source != "ngram"]
    if not own:
        raise OptionError("there is nothing to calibrate without a draft model: name one")
    options = replace(options, proposer=own[0])
    survey, report = Survey(most_drafted(pair, own[0])), progress or _ignore
    report(0, turns)
    while survey.turns < turns:
        proposer = make_proposer(endless, options, survey)
        ids = [pair.vocabulary // 2] * 8
        decoding = _decoding(endless, ids, options, proposer, survey, Recorder(), None, None)
        while survey.turns < turns and decoding.step().finish_reason is None:
            report(survey.turns, turns)
    report(turns, turns)
    costs = survey.measured()
    cost_cache.write(cost_key(pair, options, own[0]), costs)
    return costs


def generate(pair: Pair, prompt: str | Sequence[int], options: Options | None = None) -> Result:
    """The whole text at once; see `stream_generate`."""
    return stream_generate(pair, prompt, options).result()


def compare_logits(source: Path, written: Path) -> float:
    """Largest absolute difference of log-probabilities of two checkpoints on a fixed input.

    Both in float32. Raises CheckpointError where one of them does not load.
    """
    rows = []
    for directory in (source, written):
        loaded = load_model(directory, dtype="float32")
        prompt = [2 + index for index in range(8)]
        context = loaded.model.open(prompt)
        fed = mx.array([loaded.model.prefix(prompt)[-1:] + prompt[:4]], dtype=mx.int32)
        logits = context.advance(fed).logits.astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(rows[-1])
        del loaded, context  # one model at a time in memory
        mx.clear_cache()
    difference: Any = mx.max(mx.abs(rows[0] - rows[1])).item()
    return float(difference)


def _checked(pair: Pair) -> tuple[Pair, Check]:
    """The same models, whose contexts compare themselves with the committed tokens."""
    target = CheckedModel(pair.target)
    draft = None if pair.draft is None else CheckedModel(pair.draft)

    def check(committed: Sequence[int]) -> None:
        target.compare(committed)
        if draft is not None:
            seen = committed if pair.translation is None else pair.translation.feed(committed)
            draft.compare(seen)

    return replace(pair, target=target, draft=draft), check


def encode(pair: Pair, prompt: str | Sequence[int], options: Options) -> list[int]:
    """Token ids of a prompt; ids stay as they are. Raises PromptError for an empty text."""
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt.strip():
        raise PromptError("the prompt is empty: give some text")
    if options.chat_template and pair.tokenizer.has_chat_template:
        return pair.tokenizer.apply_chat(prompt)
    return pair.tokenizer.encode(prompt)


def _decoding(
    pair: Pair,
    ids: Sequence[int],
    options: Options,
    proposer: Proposer | None,
    lengths: DraftLength,
    recorder: Recorder,
    check: Check | None,
    progress: Progress | None,
) -> Decoding:
    context = pair.target.open(ids, progress)
    prefix = pair.target.prefix(ids)
    return Decoding(
        target=context,
        proposer=proposer,
        rule=_rule(options),
        law=Law(options.sampling, pair.vocabulary),
        noise=_noise(pair, options),
        draft_length=lengths,
        ending=_ending(pair, options, len(prefix)),
        recorder=recorder,
        committed=prefix,
        prompt=ids,
        check=check,
    )


def _ignore(done: int, total: int) -> None:
    return None


def _rule(options: Options) -> Rule:
    if options.simulated_acceptance is not None:
        return ForcedAcceptance(options.simulated_acceptance, options.seed)
    if options.rule_name == "lenient":
        return LenientGreedy(options.delta)
    if options.rule_name == "typical":
        return TypicalRule(options.posterior_threshold, options.posterior_alpha)
    if options.rule_name == "coupled" or options.temperature == 0:
        return Coupled()
    return BlockRule() if options.rule_name == "block" else TokenRule(options.delta)


def _noise(pair: Pair, options: Options) -> NoiseSource:
    if options.temperature == 0:
        return SilentNoise()
    if options.rule_name in ("coupled", "simulated"):
        return CoupledNoise(options.seed, pair.vocabulary)
    return IndependentNoise(options.seed, pair.vocabulary)


def _ending(pair: Pair, options: Options, prefix: int) -> Ending:
    longest = pair.target.max_length
    room = options.max_tokens if longest is None else min(options.max_tokens, longest - prefix)
    return Ending(
        # A text that only measures the loop goes on to the end.
        eos=pair.eos_token_ids if options.simulated_acceptance is None else frozenset(),
        room=room,
        stream=TextStream(pair.tokenizer),
        stops=StopStrings(options.stop) if options.stop else None,
    )
