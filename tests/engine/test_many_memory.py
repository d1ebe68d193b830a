"""What is decoded together stays within a budget of bytes, and what would not fit waits."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import system
from mlx_specdec.core.loop import Group
from mlx_specdec.core.options import Options
from mlx_specdec.core.proposer import Aligned
from mlx_specdec.core.row import Request
from mlx_specdec.engine.memory import BatchSize, Extent, MemoryBudget, default_budget
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.scheduler import Scheduler

from ..support.drafter_pairs import made
from ..support.pairs import SIZE, decoder_only, encoder_decoder

KIB, GB = 1 << 10, 10**9
TEXT = [(7 * place) % (SIZE - 3) + 3 for place in range(700)]


def options(**settings) -> Options:
    return Options(**{"max_tokens": 20, "regular": True, "cost_cache": False, **settings})


def like_8b(per_token: int = 128 * KIB) -> Pair:
    """A pair of which only sizes matter: an 8B model at 4 bits."""
    target = SimpleNamespace(
        nbytes=4_600_000_000,
        prefix=list,
        cache_nbytes=lambda source, positions: per_token * positions,
        prefill_nbytes=lambda prompt, step: 0,
        holds_scores=False,
    )
    return SimpleNamespace(target=target, draft=None, drafter_network=None, draft_bytes=0)


def test_the_default_leaves_room_for_models_passes_and_the_prompt_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system, "usable_memory", lambda: 16 * GB)
    assert default_budget(4_600_000_000, 2 * GB) == 8_400_000_000
    monkeypatch.setattr(system, "usable_memory", lambda: 8 * GB)
    assert default_budget(4_600_000_000, 2 * GB) == 1_450_000_000
    monkeypatch.setattr(system, "usable_memory", lambda: 4 * GB)
    assert default_budget(4_600_000_000, 2 * GB) == GB / 4


def contexts(group: Group) -> set[Any]:
    """Return the contexts of a group in the target and in the draft model."""
    places = [state for row in group.members for state in row.state.values()]
    targets = [member.target for member in (group, *group._joining)]
    return {*targets, *(place.context for place in places if isinstance(place, Aligned))}


def held(run: Scheduler) -> int:
    """Return the bytes in the caches of all groups."""
    arrays: list[mx.array] = []
    for group in [*run.prefilling, *run._running]:
        for context in contexts(group):
            arrays += [array for cache in context._caches for array in cache.state]
            arrays += [states for states, _ in getattr(context, "_parts", ())]
            if encoded := getattr(context, "_given", None):
                arrays += [array for pair in encoded.projected for array in pair]
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize(
    ("family", "proposer"),
    [
        ("llama", "draft"),
        ("own-head-scaled", "draft"),
        ("llama", "dspark"),
        ("llama", "eagle3"),
        ("own-head-scaled", "eagle3"),
    ],
)
@pytest.mark.filterwarnings("ignore:the prompt has")
def test_caches_never_hold_more_than_is_reserved_nor_that_more_than_the_budget(
    family: str, proposer: str, tmp_path: Path
) -> None:
    if proposer != "draft":
        pair = made(proposer, family, tmp_path)
    else:
        pair = decoder_only(family) if family == "llama" else encoder_decoder(family, 0.1)
    dice = random.Random(3)
    settings = {"regular": False, "num_draft": 3, "proposer": proposer, "prefill_step_size": 64}
    requests = [
        Request(
            TEXT[: dice.choice([1, 5, 60, 300, 700])],
            options(max_tokens=dice.choice([1, 9, 40]), seed=seed, **settings),
        )
        for seed in range(9)
    ]
    prices = MemoryBudget(pair)
    longest = [Extent(700, 700 if family == "llama" else 1, 741)]
    budget = 3 * prices.of_caches(longest) // 2 + prices.of_prefill(longest)
    run = Scheduler(pair, None, requests[0].options, BatchSize(6), memory_budget=budget)
    number, waited, drafted = 0, False, False
    while number < len(requests) or not run.idle:
        if number < len(requests):
            run.add(number, requests[number])
            number += 1
        run._admit()
        reserved = run.reserved_bytes
        assert reserved <= run.budget.nbytes
        waited |= len(run.waiting) > 0
        assert all(part.error is None for part in run.step())
        assert held(run) <= reserved
        drafted |= any(len(contexts(group)) > 1 for group in run._running)
    assert waited and drafted


def test_nobody_passes_the_first_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = decoder_only("llama")
    monkeypatch.setattr(type(pair.target), "prefill_nbytes", lambda self, prompt, step: 0)
    row = MemoryBudget(pair).of_caches([Extent(5, 5, 25)])
    run = Scheduler(pair, None, options(), BatchSize(8), memory_budget=3 * row)
    # The second one takes as much as three, so that it fits alone; the third would fit at once.
    prompts = [TEXT[:5], TEXT[:600], TEXT[:6], TEXT[:7]]
    assert run.budget.of_caches([Extent(600, 600, 620)]) == 3 * row
    for number, prompt in enumerate(prompts):
        run.add(number, Request(prompt, options()))
    first: list[int] = []
    while not run.idle:
        for part in run.step():
            assert part.error is None
            if part.tokens and part.number not in first:
                first.append(part.number)
            if part.last:
                assert first[: part.number + 1] == list(range(part.number + 1))
    assert first == [0, 1, 2, 3]
