"""Other programs that run a pair: mlx-lm and, where torch is installed, transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..assemble import Pair
from ..costs.passes import Clock
from ..models.decoder_only import DecoderOnlyModel
from ..options import Options
from .hugging_face import HuggingFace, NoBaselineError, hugging_face
from .methods import Length, Method, Runner, Sample
from .transformers_baseline import transformers_methods


def find_baselines(
    pair: Pair,
    options: Options,
    lengths: Sequence[Length],
    installed: Callable[[], HuggingFace] = hugging_face,
) -> tuple[list[Method], list[str]]:
    """All that can run these models here, and a sentence on each program: what it ran on or why it
    did not. installed: raises NoBaselineError where torch is not."""
    ours = mlx_lm_methods(pair, options, lengths)
    notes = [] if ours else ["mlx-lm is left out: it has no model of this kind"]
    try:
        hugging = installed()
        theirs = transformers_methods(pair, options, lengths, hugging)
    except NoBaselineError as problem:
        return ours, [*notes, f"transformers is left out: {problem}"]
    return [*ours, *theirs], [*notes, hugging.describe()]


def mlx_lm_methods(
    pair: Pair,
    options: Options,
    lengths: Sequence[Length],
    clock: Clock = time.perf_counter,
) -> list[Method]:
    """mlx-lm's own plain decoding of the same weights, in the same process, and its speculative
    decoding where there is a draft; none for a pair that it cannot run.

    Both run their prompt pass before they yield the first token, which is therefore not counted.
    """
    if not isinstance(pair.target, DecoderOnlyModel) or pair.translation is not None:
        return []
    networks = [pair.target.network]
    fixed = [0]
    if isinstance(pair.draft, DecoderOnlyModel):
        networks.append(pair.draft.network)
        fixed += [n for n in lengths if n != "auto"]
    same_text, eos = options.temperature == 0, pair.eos_token_ids
    return [
        Method(
            f"mlx-lm {length or 'plain'}",
            "mlx-lm",
            length,
            same_text,
            _runner(networks, eos, options, length, clock),
        )
        for length in fixed
    ]


def _runner(
    networks: Sequence[Any], eos: frozenset[int], options: Options, length: int, clock: Clock
) -> Runner:
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.sample_utils import make_sampler

    asked: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "sampler": make_sampler(
            temp=options.temperature,
            top_p=options.top_p if options.top_p < 1 else 0.0,
            min_p=options.min_p,
            top_k=options.top_k,
        ),
    }

    def run(prompt: Sequence[int]) -> Sample:
        ids = mx.array(list(prompt))
        if length:
            steps = speculative_generate_step(ids, *networks, num_draft_tokens=length, **asked)
        else:
            steps = generate_step(ids, networks[0], **asked)
        tokens: list[int] = []
        started, rounds = clock(), 0
        # (token, log-probabilities) or these and whether it was drafted.
        for token, _, *drafted in steps:
            if not tokens:
                started = clock()
            else:
                rounds += not any(drafted)
            tokens.append(int(token))
            if tokens[-1] in eos:
                break
        return Sample(tuple(tokens), max(0, len(tokens) - 1), clock() - started, rounds)

    return run
