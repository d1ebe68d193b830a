"""Costs and acceptance rates that earlier rounds have left, and rounds on a fake clock."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mlx_specdec.core.proposer import LONGEST_DRAFT, Drafter
from mlx_specdec.core.statistics import Timed
from mlx_specdec.core.worth import TRIAL_INTERVAL, Costs, Memory, Worth
from mlx_specdec.results import Step

STEP = 0.01
"""Seconds of a plain step."""


def teach(
    memory: Memory,
    drafter: Drafter,
    cost: Callable[[int], float],
    accepted: float = 0.7,
    rows: int = 1,
    doublings: int = 0,
) -> None:
    """Save the cost ratio of each draft length, and the acceptance rate of each position."""
    table = Costs(memory, rows, doublings, [drafter.costs])
    table.trials[:] = TRIAL_INTERVAL, 8
    table.plain[:] = STEP, 8
    for drafted in range(1, LONGEST_DRAFT + 1):
        table.timed[drafter.costs][drafted][:] = STEP * cost(drafted), 8
    acceptance = memory.entries[f"acceptance {drafter.text}"] = []
    acceptance += [1000.0] * LONGEST_DRAFT, [1000.0 * accepted] * LONGEST_DRAFT
    for name in ("", drafter.costs):
        for drafted in range(LONGEST_DRAFT + 1):
            memory.rounds[name, drafted, rows] = 1


def learn(
    worth: Worth,
    drafted: int,
    accepted: int = 0,
    steps: float | None = 1.0,
    *,
    proposer: str = "",
    rows: int = 1,
    left: int = 1_000,
    prompt: int = 5,
    pipelined: bool = True,
    ended: bool = False,
) -> None:
    """Teach a round of equal rows that takes so many plain steps, or None if it was not timed."""
    row: Any = SimpleNamespace(committed=range(prompt + 5), prompt=range(prompt), remaining=left)
    reason = "eos" if ended else None
    tokens = (1,) * (accepted + 1)
    step = Step(0, tokens, drafted, accepted, proposer, finish_reason=reason)
    interval = None if steps is None else STEP * steps
    timed = Timed(1.0, interval=interval, pipelined=pipelined and not drafted)
    proposal: Any = SimpleNamespace(size=drafted, source=proposer)
    worth.learn([row] * rows, [step] * rows, proposal, timed)


def run(
    worth: Worth,
    rounds: int,
    cost: Callable[[int], float],
    accepted: Callable[[int], int],
    rows: int = 1,
) -> list[int]:
    """Take rounds of one proposer, and return their draft lengths.

    Args:
        cost: Returns the cost ratio of a draft length.
        accepted: Returns how many draft tokens of a round, by its number, the target accepts."""
    chosen = []
    for number in range(rounds):
        drafted = worth.choose(1_000, rows)
        stays = min(drafted, accepted(number))
        learn(worth, drafted, stays, cost(drafted) if drafted else 1.0, rows=rows)
        chosen.append(drafted)
    return chosen
