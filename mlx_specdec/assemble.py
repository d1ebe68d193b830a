"""The only table of names: models, proposers and rules come together here and nowhere else.

Knows every package below. Knows nothing of terminals.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import blas
from .cache_settings import CacheSettings
from .checkpoints.source import resolve
from .contracts import Model, NoiseSource, Progress, Proposer, Rule
from .decoding import cost_cache
from .decoding.cost_cache import CostKey
from .decoding.draft_length import AutoLength, DraftLength, FixedLength, Survey
from .decoding.ending import Ending
from .decoding.loop import Check, Decoding
from .decoding.run import Labels, Result, Run, Surroundings
from .decoding.statistics import Recorder
from .drafting.draft_model import DraftModel
from .drafting.lookup import PromptLookup
from .drafting.translation import Translation
from .errors import OptionError, PromptError
from .models.checked import CheckedModel
from .models.loading import Loaded, load_model
from .options import Options
from .sampling.law import Law
from .sampling.noise import CoupledNoise, IndependentNoise, SilentNoise
from .text.stream import StopStrings, TextStream
from .text.tokenizer import Tokenizer, load_tokenizer
from .text.vocabulary import common_size, shared_tokens
from .verification.block import BlockRule
from .verification.coupled import Coupled, LenientGreedy
from .verification.rejection import TokenRule
from .verification.typical import TypicalRule

DRAFT_VOCABS = ("same", "intersect")
DEBUG = "MLX_SPECDEC_DEBUG"
"""Environment variable: compare every context with the committed tokens after every round."""


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, and a draft model where there is one; shared by many generations.

    vocabulary: number of token ids that target and tokenizer both know; every law has this width.
    translation: for a draft whose vocabulary is another.
    """

    name: str
    draft_name: str | None
    target: Model
    draft: Model | None
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocabulary: int
    dtype: str
    load_seconds: float
    translation: Translation | None = None


def load(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    q_bits: int | None = None,
    draft_q_bits: int | None = None,
    caches: CacheSettings | None = None,
    draft_vocab: str = "same",
    progress: Progress | None = None,
) -> Pair:
    """Load a target and, if named, a draft model with the same vocabulary.

    model, draft_model: a directory or a name on the Hugging Face Hub. dtype: "auto" computes in
    float32 on the CPU and as stored elsewhere; or float32, float16, bfloat16. q_bits: quantise on
    load. caches: quantised or cut KV caches; a draft that cannot have them keeps its own.
    draft_vocab: "same" refuses a draft with other tokens, "intersect" drafts the tokens that both
    have. Raises SourceError, CheckpointError, VocabularyError, OptionError.
    """
    started = time.perf_counter()
    target, tokenizer = _load_one(str(model), revision, dtype, q_bits, caches, progress)
    if draft_vocab not in DRAFT_VOCABS:
        raise OptionError(f"draft-vocab must be same or intersect, not {draft_vocab!r}")
    width = min(target.model.vocabulary, tokenizer.size)
    translation: Translation | None = None
    draft: Loaded | None = None
    if draft_model is not None:
        draft, draft_tokenizer = _load_draft(
            str(draft_model), dtype, draft_q_bits, caches, progress
        )
        if draft.kind != target.kind:
            raise OptionError(
                f"the draft model is {draft.kind} and the target {target.kind}: give a draft of "
                "the target's own kind"
            )
        widths = target.model.vocabulary, draft.model.vocabulary
        if draft_vocab == "intersect":
            translation = Translation(*shared_tokens(tokenizer, draft_tokenizer, *widths))
        else:
            width = common_size(tokenizer, draft_tokenizer, *widths)
    return Pair(
        name=str(model),
        draft_name=None if draft_model is None else str(draft_model),
        target=target.model,
        draft=None if draft is None else draft.model,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(target.eos_token_ids or tokenizer.eos_token_ids),
        vocabulary=width,
        dtype=target.dtype,
        load_seconds=time.perf_counter() - started,
        translation=translation,
    )


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
    proposer = _proposer(pair, options)
    lengths = _draft_length(pair, options)
    decoding = _decoding(pair, ids, options, proposer, lengths, recorder, check, progress)
    kind = proposer_kind(pair, options)
    labels = Labels(
        model=pair.name,
        draft_model=pair.draft_name if kind == "draft" else None,
        proposer=kind,
        rule=options.rule_name,
        lossy=options.lossy,
        delta=options.delta,
        seed=options.seed,
        num_draft=options.num_draft if proposer is not None else 0,
        prompt_tokens=len(ids),
    )
    around = Surroundings(
        load_seconds=pair.load_seconds,
        prompt_seconds=recorder.clock() - started,
        device=device_name(),
        blas=blas.name(),
        peak_memory=mx.get_peak_memory,
    )
    auto = lengths if isinstance(lengths, AutoLength) else None
    return Run(decoding, recorder, labels, around, _keeper(pair, options, auto), auto)


def calibrate(
    pair: Pair, *, temperature: float = 0.0, turns: int = 8, progress: Progress | None = None
) -> dict[int, float]:
    """Measure what a round of 1 .. 16 drafted tokens costs, in plain steps, and keep it for auto.

    turns: how often each length is measured; medians count. Raises OptionError without a draft.
    """
    options = Options(max_tokens=sys.maxsize, num_draft="auto", temperature=temperature)
    endless = replace(pair, eos_token_ids=frozenset())
    survey, report = Survey(AutoLength.MOST), progress or _ignore
    report(0, turns)
    while survey.turns < turns:
        proposer = _proposer(endless, options)
        if proposer is None:
            raise OptionError("there is nothing to calibrate without a draft model: name one")
        ids = [pair.vocabulary // 2] * 8
        decoding = _decoding(endless, ids, options, proposer, survey, Recorder(), None, None)
        while survey.turns < turns and decoding.step().finish_reason is None:
            report(survey.turns, turns)
    report(turns, turns)
    costs = survey.measured()
    cost_cache.write(_cost_key(pair, options), costs)
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
        prompt = [2 + index % 61 for index in range(32)]
        context = loaded.model.open(prompt)
        fed = mx.array([loaded.model.prefix(prompt)[-1:] + prompt[:8]], dtype=mx.int32)
        logits = context.advance(fed).logits.astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(rows[-1])
        del loaded, context  # one model at a time in memory
        mx.clear_cache()
    difference: Any = mx.max(mx.abs(rows[0] - rows[1])).item()
    return float(difference)


def device_name() -> str:
    """Where MLX computes: "cpu", or the accelerator's own name."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))


def _load_draft(
    name: str,
    dtype: str,
    q_bits: int | None,
    caches: CacheSettings | None,
    progress: Progress | None,
) -> tuple[Loaded, Tokenizer]:
    try:
        return _load_one(name, None, dtype, q_bits, caches, progress)
    except OptionError:
        # The text is the target's whatever the draft remembers; what is wrong comes again.
        return _load_one(name, None, dtype, q_bits, None, progress)


def _load_one(
    name: str,
    revision: str | None,
    dtype: str,
    q_bits: int | None,
    caches: CacheSettings | None,
    progress: Progress | None,
) -> tuple[Loaded, Tokenizer]:
    directory = resolve(name, revision=revision, progress=progress)
    loaded = load_model(directory, dtype=dtype, q_bits=q_bits, caches=caches)
    return loaded, load_tokenizer(directory, kind=loaded.kind)


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


def proposer_kind(pair: Pair, options: Options) -> str:
    """Who proposes: "draft", "ngram" or "none". Raises OptionError where there is no draft."""
    if options.regular or options.num_draft == 0:
        return "none"
    if options.proposer == "draft" and pair.draft is None:
        raise OptionError("there is no draft model to propose: name one with draft-model")
    return options.proposer or ("none" if pair.draft is None else "draft")


def _proposer(pair: Pair, options: Options) -> Proposer | None:
    kind = proposer_kind(pair, options)
    if kind == "ngram":
        return PromptLookup(options.ngram_min, options.ngram_choice == "frequent")
    if kind == "none" or pair.draft is None:
        return None
    return DraftModel(pair.draft, options.sampling, pair.vocabulary, pair.translation)


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


def _draft_length(pair: Pair, options: Options) -> DraftLength:
    if options.num_draft != "auto":
        return FixedLength(options.num_draft)
    keeps = options.cost_cache and proposer_kind(pair, options) != "none"
    return AutoLength(cost_cache.read(_cost_key(pair, options)) if keeps else None)


def _keeper(pair: Pair, options: Options, auto: AutoLength | None) -> Callable[[], None] | None:
    """What writes down the costs that a text has measured."""
    if auto is None or not options.cost_cache:
        return None
    return lambda: cost_cache.merge(_cost_key(pair, options), auto.measured())


def _cost_key(pair: Pair, options: Options) -> CostKey:
    kind = proposer_kind(pair, options)
    drafts = kind == "draft"
    return CostKey(
        device=device_name(),
        mlx=version("mlx"),
        blas=blas.name(),
        target=pair.name,
        target_bytes=pair.target.nbytes,
        draft=pair.draft_name or "" if drafts else kind,
        draft_bytes=pair.draft.nbytes if drafts and pair.draft is not None else 0,
        dtype=pair.dtype,
        sampled=options.temperature > 0,
    )


def _ignore(done: int, total: int) -> None:
    return None


def _rule(options: Options) -> Rule:
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
    if options.rule_name == "coupled":
        return CoupledNoise(options.seed, pair.vocabulary)
    return IndependentNoise(options.seed, pair.vocabulary)


def _ending(pair: Pair, options: Options, prefix: int) -> Ending:
    longest = pair.target.max_length
    room = options.max_tokens if longest is None else min(options.max_tokens, longest - prefix)
    return Ending(
        eos=pair.eos_token_ids,
        room=room,
        stream=TextStream(pair.tokenizer),
        stops=StopStrings(options.stop) if options.stop else None,
    )
