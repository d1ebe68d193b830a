"""Other programs that run a pair: mlx-lm and, where torch is installed, transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import mlx.core as mx

from ..engine.pair import Pair
from ..models.mlx_lm.model import DecoderOnlyModel
from ..options import Options
from .methods import Length, Method, Runner, Sample, any_token, room
from .throughput import FileMethod, Prompts, Texts
from .transformers_baseline import HuggingFace, NoBaselineError, hugging_face, try_out

T = TypeVar("T", Method, FileMethod)

PREFILL_BATCH_SIZE = 8
"""Prompts that mlx-lm reads together by default."""


def find_baselines(
    mlx_lm: Callable[[], list[T]],
    transformers: Callable[[HuggingFace], list[T]],
    installed: Callable[[], HuggingFace] = hugging_face,
) -> tuple[list[T], list[str]]:
    """Return all methods that can run here, and a sentence on each program: what it ran on, or why
    it did not. installed: raises NoBaselineError without torch."""
    methods: list[T] = []
    notes: list[str] = []
    try:
        methods += mlx_lm()
    except NoBaselineError as problem:
        notes.append(f"mlx-lm is left out: {problem}")
    try:
        hugging = installed()
        methods += transformers(hugging)
        notes.append(hugging.describe())
    except NoBaselineError as problem:
        notes.append(f"transformers is left out: {problem}")
    return methods, notes


def mlx_lm_methods(pair: Pair, options: Options, lengths: Sequence[Length]) -> list[Method]:
    """Return mlx-lm's plain decoding of the same weights, in the same process, and its speculative
    decoding where there is a draft. Raises NoBaselineError for a pair that it cannot run. Both run
    their prompt pass before they yield the first token, which is therefore not counted."""
    networks = [_network(pair)]
    fixed = [0]
    if isinstance(pair.draft, DecoderOnlyModel):
        networks.append(pair.draft.network)
        fixed += [n for n in lengths if n != "auto"]
    runners = {length: _runner(networks, pair.eos_token_ids, options, length) for length in fixed}
    name, same_text = "mlx-lm", options.temperature == 0
    return [
        Method(f"{name} {length or 'plain'}", name, length, same_text, run)
        for length, run in runners.items()
    ]


def mlx_lm_file_methods(pair: Pair, options: Options, sizes: Sequence[int]) -> list[FileMethod]:
    """Return mlx-lm's batch generation of the same weights, in the same process. Raises
    NoBaselineError for a model that it cannot run so."""
    run, token = partial(_batches, _network(pair), pair, options), any_token(pair)
    try_out(lambda: list(run(2, [[token], [token, token]])))
    name, same_text = "mlx-lm", options.temperature == 0
    return [
        FileMethod(f"{name} plain", name, size, same_text, partial(run, size)) for size in sizes
    ]


def _batches(network: Any, pair: Pair, options: Options, size: int, prompts: Prompts) -> Texts:
    """As mlx_lm.generate.batch_generate, which leaves out EOS and yields nothing before the end."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(
        network,
        stop_tokens=[[token] for token in sorted(pair.eos_token_ids)],
        sampler=_sampler(options),
        completion_batch_size=size,
        prefill_batch_size=min(size, PREFILL_BATCH_SIZE),
    )
    rooms = [room(pair, options, prompt) for prompt in prompts]
    numbers = {uid: n for n, uid in enumerate(generator.insert(list(map(list, prompts)), rooms))}
    texts: list[list[int]] = [[] for _ in prompts]
    try:
        while responses := generator.next_generated():
            for each in responses:
                tokens = texts[numbers[each.uid]]
                tokens.append(each.token)
                if each.finish_reason is not None:
                    yield numbers[each.uid], Sample(tuple(tokens), len(tokens), 0.0)
    finally:
        generator.close()


def _network(pair: Pair) -> Any:
    if not isinstance(pair.target, DecoderOnlyModel) or pair.translation is not None:
        raise NoBaselineError("it has no model of this kind")
    return pair.target.network


def _sampler(options: Options) -> Any:
    from mlx_lm.sample_utils import make_sampler

    return make_sampler(
        temp=options.temperature,
        top_p=options.top_p if options.top_p < 1 else 0.0,
        min_p=options.min_p,
        top_k=options.top_k,
    )


def _runner(networks: Sequence[Any], eos: frozenset[int], options: Options, length: int) -> Runner:
    from mlx_lm.generate import generate_step, speculative_generate_step

    settings: dict[str, Any] = {"max_tokens": options.max_tokens, "sampler": _sampler(options)}

    def run(prompt: Sequence[int]) -> Sample:
        ids = mx.array(list(prompt))
        if length:
            steps = speculative_generate_step(ids, *networks, num_draft_tokens=length, **settings)
        else:
            steps = generate_step(ids, networks[0], **settings)
        tokens: list[int] = []
        started, rounds = perf_counter(), 0
        # (token, log-probabilities) or these and whether it was drafted.
        for token, _, *drafted in steps:
            if not tokens:
                started = perf_counter()
            else:
                rounds += not any(drafted)
            tokens.append(int(token))
            if tokens[-1] in eos:
                break
        return Sample(tuple(tokens), max(0, len(tokens) - 1), perf_counter() - started, rounds)

    return run
