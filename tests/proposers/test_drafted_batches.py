"""Drafters whose rows share passes: the passes they take, and rows with cached prefixes."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.generate import generate, generate_many
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.models.drafters.network import DrafterNetwork

from ..support.drafter_pairs import MAKERS, gemma4, made

PROMPTS = [[(7 * at + 5 * row) % 35 + 3 for at in range(2 + 3 * row)] for row in range(8)]
OPTIONS = Options(max_tokens=12, num_draft=3, cost_cache=False, logit_bias={1: -1e9, 2: -1e9})


def counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """Return the passes for each prompt alone, and those for all prompts together."""
    passes, embed = [0], DrafterNetwork.embed

    def counting(self, tokens):
        passes[0] += 1
        return embed(self, tokens)

    monkeypatch.setattr(DrafterNetwork, "embed", counting)
    alone, plain = [], []
    for prompt in PROMPTS:
        passes[0] = 0
        plain.append(generate(pair, prompt, OPTIONS).tokens)
        alone.append(passes[0])
    passes[0] = 0
    found = generate_many(pair, PROMPTS, OPTIONS, batch_size=8)
    assert [result.tokens for result in found] == plain
    return alone, passes[0]


@pytest.mark.parametrize("kind", [*MAKERS, "gemma4_assistant"])
def test_eight_rows_take_the_passes_of_the_row_that_needs_most(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = gemma4("dense") if kind == "gemma4_assistant" else made(kind, "llama", tmp_path)
    alone, together = counted(pair, monkeypatch)
    assert max(alone) <= together <= max(alone) + 3
    assert 3 * together <= sum(alone)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_rows_with_cached_prefixes_draft_the_same_in_a_batch(kind: str, tmp_path: Path) -> None:
    """With a lenience of 1 every draft token is a part of the completion."""
    pair, cache = made(kind, "llama", tmp_path), PromptCache(1 << 24)
    lenient = replace(OPTIONS, delta=1.0, proposer=kind)
    prompts = [[*PROMPTS[4], *range(5, end)] for end in (7, 6, 9)]
    expected = [generate(pair, prompt, lenient).tokens for prompt in prompts]
    for least in (0, len(PROMPTS[4]) - 1):
        run, found = Scheduler(pair, None, lenient, BatchSize(2), cache), {}
        for number, prompt in enumerate(prompts):
            run.add(number, Request(prompt, lenient))
        while not run.idle:
            for step in run.step():
                if step.result is not None:
                    found[step.number] = step.result
        assert [found[number].tokens for number in range(3)] == expected
        assert all(result.labels.cached_tokens >= least for result in found.values())
