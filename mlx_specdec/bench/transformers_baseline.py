"""transformers' own plain and assisted generation of the same weights, in the same process.

Both families of models; the draft is the assistant.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..assemble import Pair
from ..checkpoints import files
from ..checkpoints.source import as_directory, resolve_config
from ..costs.passes import Clock
from ..models.decoder_only import DecoderOnlyModel
from ..options import SELF, Options
from .hugging_face import HuggingFace, NoBaselineError, build, try_out
from .methods import Length, Method, Runner, Sample, any_token, room
from .throughput import FileMethod, Prompts, Texts


def transformers_methods(
    pair: Pair,
    options: Options,
    lengths: Sequence[Length],
    hugging: HuggingFace,
    clock: Clock = time.perf_counter,
) -> list[Method]:
    """Plain, and assisted where the draft can be an assistant: always the same number of drafted
    tokens, whatever their probability.

    Sampled texts are another generator's, so that only greedy ones are held to plain decoding's,
    and those only where both sides compute in float32. Raises NoBaselineError.
    """
    generation = _generation(pair, options, hugging, clock)
    runs: dict[int, Runner] = {0: generation.run}
    assisted = [length for length in lengths if isinstance(length, int) and length > 0]
    # An assistant has the target's own vocabulary, and weights of its own.
    assists = pair.draft is not None and pair.translation is None and pair.draft_name != SELF
    if assists and assisted:
        draft = _built(hugging, str(pair.draft_name), pair.draft)
        runs |= {n: partial(generation.run, draft=draft, length=n) for n in assisted}
    for run in runs.values():
        try_out(partial(run, [any_token(pair)] * 2))
    same_text = generation.same_text
    return [
        Method(f"transformers {length or 'plain'}", "transformers", length, same_text, run)
        for length, run in runs.items()
    ]


def transformers_file_methods(
    pair: Pair, options: Options, sizes: Sequence[int], hugging: HuggingFace
) -> list[FileMethod]:
    """Plain, so many texts in one call of `generate`, the longest prompts first. Raises
    NoBaselineError."""
    generation = _generation(pair, options, hugging, time.perf_counter)
    name, token, same_text = "transformers", any_token(pair), generation.same_text
    try_out(lambda: list(generation.run_all(2, [[token], [token, token]])))
    runs = {size: partial(generation.run_all, size) for size in sizes}
    return [
        FileMethod(f"{name} plain", name, size, same_text, run, in_mlx=False)
        for size, run in runs.items()
    ]


def _generation(pair: Pair, options: Options, hugging: HuggingFace, clock: Clock) -> _Generation:
    if pair.heads is not None:
        raise NoBaselineError("it has no Medusa heads: name their base model as the model")
    return _Generation(pair, options, hugging, clock, _built(hugging, pair.name, pair.target))


def _built(hugging: HuggingFace, name: str, model: Any) -> Any:
    with as_directory(resolve_config(name)) as directory:
        config = files.read_config(directory)
    return build(hugging, config, model.network)


@dataclass(frozen=True)
class _Generation:
    """Texts of one target; model: transformers'."""

    pair: Pair
    options: Options
    hugging: HuggingFace
    clock: Clock
    model: Any

    @property
    def same_text(self) -> bool:
        """Whether the texts are held to plain decoding's."""
        return self.options.temperature == 0 and self.pair.dtype == "float32"

    def run_all(self, size: int, prompts: Prompts) -> Texts:
        """All prompts, `size` of like length in one call."""
        torch, configured = self.hugging.torch, self.hugging.transformers.GenerationConfig
        # Sources are padded on the right.
        left = isinstance(self.pair.target, DecoderOnlyModel)
        order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]), reverse=True)
        for group in (order[start : start + size] for start in range(0, len(order), size)):
            # The longest prompt has the least room.
            longest = len(prompts[group[0]])
            told = _settings(self.pair, self.options, prompts[group[0]])
            rows = [_padded(prompts[n], longest, told["pad_token_id"], left) for n in group]
            mask = [_padded([1] * len(prompts[n]), longest, 0, left) for n in group]
            with self.hugging.at_work(self.options.seed):
                made = self.model.generate(
                    torch.tensor(rows),
                    attention_mask=torch.tensor(mask),
                    generation_config=configured(**told),
                )
            for number, row in zip(group, made.tolist(), strict=True):
                # In front is the padded prompt, or the decoder's start token.
                tokens = _until_eos(row[longest if left else 1 :], self.pair.eos_token_ids)
                yield number, Sample(tokens, len(tokens), 0.0)

    def run(self, prompt: Sequence[int], draft: Any = None, length: int = 0) -> Sample:
        """length: drafted tokens a round, where there is a draft. Raises PromptError where the
        model has no room for a token."""
        configured = self.hugging.transformers.GenerationConfig
        tokens = self.hugging.torch.tensor([list(prompt)])
        rest = {}
        if draft is not None:
            draft.generation_config = configured(
                num_assistant_tokens=length,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
            rest["assistant_model"] = draft
        listener = Listener(self.clock)
        with self.hugging.at_work(self.options.seed):
            self.model.generate(
                tokens,
                attention_mask=self.hugging.torch.ones_like(tokens),
                generation_config=configured(**_settings(self.pair, self.options, prompt)),
                streamer=listener,
                **rest,
            )
        return listener.sample()


def _settings(pair: Pair, options: Options, prompt: Sequence[int]) -> dict[str, Any]:
    eos = sorted(pair.eos_token_ids)
    return {
        "max_new_tokens": room(pair, options, prompt),
        "eos_token_id": eos or None,
        "pad_token_id": eos[0] if eos else 0,
        "decoder_start_token_id": pair.target.prefix(prompt)[-1],
        **sampling(options),
    }


def _padded(row: Sequence[int], length: int, token: int, left: bool) -> list[int]:
    padding = [token] * (length - len(row))
    return [*padding, *row] if left else [*row, *padding]


def _until_eos(tokens: Sequence[int], eos: frozenset[int]) -> tuple[int, ...]:
    """What comes behind an EOS is padding."""
    ends = (at for at, token in enumerate(tokens, start=1) if token in eos)
    return tuple(tokens[: next(ends, len(tokens))])


def sampling(options: Options) -> dict[str, Any]:
    """The distribution in transformers' words; the order of the filters is the same."""
    if options.temperature == 0:
        return {"do_sample": False}
    asked = {
        "do_sample": True,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
    }
    return {**asked, "min_p": options.min_p} if options.min_p else asked


class Listener:
    """A streamer that keeps when tokens came.

    transformers hands it the prompt, then the tokens of a round at a time. The first round has the
    prompt pass in it, so that its tokens are not counted.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: list[tuple[float, Any]] = []

    def put(self, tokens: Any) -> None:
        """tokens: (n,) or (1, n), on the CPU."""
        self._heard.append((self._clock(), tokens))

    def end(self) -> None:
        """Part of a streamer; the last round has been heard."""

    def sample(self) -> Sample:
        """What was heard."""
        rounds = [(at, each.reshape(-1).tolist()) for at, each in self._heard[1:]]
        tokens = tuple(int(token) for _, each in rounds for token in each)
        if not rounds:
            return Sample((), 0, 0.0, 0)
        (first, together), (last, _) = rounds[0], rounds[-1]
        return Sample(tokens, len(tokens) - len(together), last - first, len(rounds) - 1)
