"""A file of texts -> hidden states of the model and the tokens that followed, sample by sample.

The base is frozen, so its states are computed once, however often something learns from them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..assemble import Pair
from ..contracts import FINAL, Progress
from ..decoding.prompt import PromptReader, chunk
from ..errors import PromptError
from ..many import Request, generate_many
from ..models.encoder_decoder import EncoderDecoderModel
from ..options import Options
from ..prepare import missing_prefix
from ..text.prompts import read_lines
from .config import DataConfig
from .rows import Rows

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One text. target: what follows the prompt, where the file says so."""

    prompt: str
    target: str = ""


def read_samples(file: Path, seed: int) -> list[Sample]:
    """Every text of a file, shuffled.

    Objects have "prompt" (or "text", or "turns", of which the first counts) and maybe "target".
    Raises PromptError for a file with nothing usable, and as `prompts.read_lines` does.
    """
    samples = [
        Sample(line) if isinstance(line, str) else _from_object(line, where)
        for where, line in read_lines(file, "data")
    ]
    if not samples:
        raise PromptError(f"{file} has nothing to train on: write one text a line")
    random.Random(seed).shuffle(samples)
    return samples


def _from_object(entry: dict[str, Any], where: str) -> Sample:
    turns = entry.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = entry.get("prompt", entry.get("text", first))
    target = entry.get("target", "")
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(target, str):
        raise PromptError(f'{where} needs "prompt" or "text", a string, and "target" must be one')
    return Sample(prompt, target)


def collect(
    pair: Pair,
    samples: Sequence[Sample],
    config: DataConfig,
    rows: Rows,
    progress: Progress,
    taps: Sequence[str] = (),
) -> list[Ids]:
    """Fill `rows`, going on behind the samples that they have; returns the prompt of each sample.

    taps: hidden states to keep before the final one, side by side; a sample's rows then begin with
    those of its prompt. Raises PromptError where fewer than two samples are of use.
    """
    longest = pair.target.max_length or config.length
    config = replace(config, length=min(config.length, longest))
    pieces = list(islice(_pieces(pair, samples, config), config.samples))
    groups = [list(range(len(pieces)))]
    if config.self_distill:
        lengths = [len(prompt) for prompt, _ in pieces]
        kinds = len(config.temperatures)
        groups = batches(lengths, config.texts_at_once, config.seed, kinds)
    done = len(rows.lengths)
    progress(min(done, len(pieces)), len(pieces))
    for prompt, tokens in _completed(pair, pieces, groups, config, done):
        # One token has a state that predicts it, and none after it for a head to guess.
        if len(tokens) < 2:
            rows.append((), None)
        elif taps:
            before = pair.target.prefix(prompt)[1:]
            rows.append((*before, *tokens), _all_states(pair, prompt, tokens, (*taps, FINAL)))
        else:
            rows.append(tokens, _states(pair, prompt, tokens))
        done += 1
        progress(done, len(pieces))
    if int((rows.lengths > 0).sum()) < 2:
        raise PromptError(
            "the data has fewer than two texts to learn from: give more of them"
            + ("" if config.self_distill else ', with "target" for an encoder-decoder model')
        )
    return [pieces[number][0] for group in groups for number in group]


def batches(lengths: Sequence[int], size: int, seed: int, kinds: int = 1) -> list[list[int]]:
    """Numbers of the prompts, `size` together whose lengths are close; the batches shuffled, so
    that the last ones are no longer than others. kinds: that many take turns, and are kept apart.
    """

    def key(number: int) -> tuple[int, int, int]:
        return number % kinds, lengths[number], number

    order = sorted(range(len(lengths)), key=key)
    groups = [sorted(order[start : start + size]) for start in range(0, len(order), size)]
    random.Random(seed).shuffle(groups)
    return groups


def _pieces(pair: Pair, samples: Sequence[Sample], config: DataConfig) -> Iterator[tuple[Ids, Ids]]:
    """Prompt and continuation of what fits; no continuation where the model is to write it."""
    own, length, encode = config.self_distill, config.length, pair.tokenizer.encode
    chat = own and pair.tokenizer.has_chat_template
    for sample in samples:
        text = missing_prefix(pair, sample.prompt, Options()) + sample.prompt
        prompt = tuple((pair.tokenizer.apply_chat if chat else encode)(text))
        target = () if own or not sample.target.strip() else tuple(encode(sample.target))
        if isinstance(pair.target, EncoderDecoderModel):
            if 0 < len(prompt) <= length and (own or target):
                yield prompt, target[:length]
        elif own:
            # Half of the length is for what the model writes.
            yield from ((part, ()) for part in _parts(prompt, length // 2))
        elif target:
            if prompt and length - len(prompt) > 1:
                yield prompt, target[: length - len(prompt)]
        else:
            yield from ((part[:1], part[1:]) for part in _parts(prompt, length) if len(part) > 2)


def _parts(ids: Ids, length: int) -> Iterator[Ids]:
    return (ids[start : start + length] for start in range(0, len(ids), length))


def _completed(
    pair: Pair,
    pieces: Sequence[tuple[Ids, Ids]],
    groups: Sequence[Sequence[int]],
    config: DataConfig,
    done: int,
) -> Iterator[tuple[Ids, Ids]]:
    """Prompt and continuation of every piece but the first `done`, group after group."""
    shared = not isinstance(pair.target, EncoderDecoderModel)
    for group in groups:
        # Of a group that was cut off, the rest: a completion is the same in whatever batch.
        rest, done = group[done:], max(0, done - len(group))
        if not config.self_distill:
            yield from (pieces[number] for number in rest)
        elif rest:
            prompts = [pieces[number][0] for number in rest]
            requests = [
                Request(
                    prompt,
                    Options(
                        max_tokens=config.length - shared * len(prompt),
                        seed=config.seed + number,
                        temperature=config.temperatures[number % len(config.temperatures)],
                        regular=True,
                    ),
                )
                for prompt, number in zip(prompts, rest, strict=True)
            ]
            results = generate_many(pair, requests, Options(regular=True), batch_size=len(rest))
            completions = [result.tokens for result in results]
            yield from zip(prompts, completions, strict=True)


def _states(pair: Pair, prompt: Ids, tokens: Ids) -> mx.array:
    """(len(tokens), width): row j is what predicts token j."""
    context, prefix = pair.target.open(prompt), pair.target.prefix(prompt)
    reader = PromptReader(context, [prefix], [prompt])
    while not reader.done:
        reader.step()
    fed = [prefix[-1], *tokens[:-1]]
    return context.advance(mx.array([fed], dtype=mx.int32), taps=(FINAL,)).hidden[FINAL][0]


def _all_states(pair: Pair, prompt: Ids, tokens: Ids, taps: Sequence[str]) -> mx.array:
    """(rows, taps x width): of everything that the model is given."""
    context = pair.target.open(prompt)
    fed, size = [*pair.target.prefix(prompt), *tokens[:-1]], chunk(1)
    parts = []
    for start in range(0, len(fed), size):
        read = mx.array([fed[start : start + size]], dtype=mx.int32)
        hidden = context.advance(read, taps=taps).hidden
        parts.append(mx.concatenate([hidden[name][0] for name in taps], axis=-1))
        mx.eval(parts[-1])
    return mx.concatenate(parts)
