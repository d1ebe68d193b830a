"""mlx-lm's own plain and speculative decoding of the same weights, in the same process.

Decoder-only pairs only: mlx-lm has no encoder-decoder models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..assemble import Pair
from ..models.decoder_only import DecoderOnlyModel
from ..options import Options
from .methods import Length, Method, Runner, Sample

FAMILY = "mlx-lm"


def mlx_lm_methods(
    pair: Pair,
    options: Options,
    lengths: Sequence[Length],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Method]:
    """Plain, and speculative where there is a draft; none for a pair that mlx-lm cannot run.

    Both run their prompt pass before they yield the first token, which is therefore not counted.
    """
    if not isinstance(pair.target, DecoderOnlyModel) or pair.translation is not None:
        return []
    assisted = (
        [n for n in lengths if n != "auto"] if isinstance(pair.draft, DecoderOnlyModel) else []
    )
    return [
        Method(
            f"mlx-lm {length or 'plain'}",
            FAMILY,
            length,
            options.temperature == 0,
            _runner(pair, options, length, clock),
        )
        for length in (0, *assisted)
    ]


def _runner(pair: Pair, options: Options, length: int, clock: Callable[[], float]) -> Runner:
    from mlx_lm.generate import generate_step, speculative_generate_step

    target, draft = _network(pair.target), _network(pair.draft)

    def run(prompt: Sequence[int]) -> Sample:
        ids = mx.array(list(prompt))
        asked: dict[str, Any] = {"max_tokens": options.max_tokens, "sampler": _sampler(options)}
        if length:
            asked["num_draft_tokens"] = length
            steps = speculative_generate_step(ids, target, draft, **asked)
        else:
            steps = generate_step(ids, target, **asked)
        return _drain(steps, pair.eos_token_ids, clock)

    return run


def _drain(steps: Iterator[Any], eos: frozenset[int], clock: Callable[[], float]) -> Sample:
    """steps: (token, log p) or (token, log p, whether it was drafted), one a token."""
    tokens: list[int] = []
    started, rounds = clock(), 0
    for token, _, *drafted in steps:
        if not tokens:
            started = clock()
        else:
            rounds += not any(drafted)
        tokens.append(int(token))
        if tokens[-1] in eos:
            break
    return Sample(tuple(tokens), max(0, len(tokens) - 1), clock() - started, rounds)


def _sampler(options: Options) -> Callable[[mx.array], mx.array]:
    from mlx_lm.sample_utils import make_sampler

    return make_sampler(
        temp=options.temperature,
        top_p=options.top_p if options.top_p < 1 else 0.0,
        min_p=options.min_p,
        top_k=options.top_k,
    )


def _network(model: Any) -> Any:
    return None if model is None else model.network
