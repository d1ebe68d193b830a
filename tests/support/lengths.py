"""What earlier rounds have taught a draft length, and rounds on a fake clock."""

import math
from collections.abc import Callable

from mlx_specdec.draft_length.auto import EXPLORE, MOST, CostTable, Source
from mlx_specdec.draft_length.length import DraftLength
from mlx_specdec.draft_length.saved import Memory
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound

STEP = 0.01
"""Seconds of a plain step."""


def teach(
    memory: Memory,
    source: Source,
    cost: Callable[[int], float],
    accepted: float = 0.7,
    rows: int = 1,
    doublings: int = 0,
) -> None:
    """Teach the cost ratio of each draft length, and the acceptance rate of each position."""
    table = CostTable(memory, rows, doublings, [source.costs])
    table.trials[:] = EXPLORE, 8
    table.entry("", 0)[:] = math.log(STEP), 8
    for drafted in range(1, MOST + 1):
        table.entry(source.costs, drafted)[:] = math.log(STEP * cost(drafted)), 8
    acceptance = memory.entries[f"acceptance {source.text}"] = []
    acceptance += [1000.0] * MOST, [1000.0 * accepted] * MOST
    for name in ("", source.costs):
        for drafted in range(MOST + 1):
            memory.rounds[name, drafted, rows] = 1


def a_round(
    drafted: int,
    accepted: int = 0,
    steps: float = 1.0,
    *,
    source: str = "",
    rows: int = 1,
    position: int = 5,
    context: int = 10,
    left: int = 1_000,
    pipelined: bool = True,
    ended: bool = False,
) -> RoundReport:
    """Return the report of a round that takes so many plain steps. All rows are alike."""
    committed = range(context)
    row = SequenceRound(
        drafted, accepted, accepted + 1, position, committed, ended=ended, left=left, source=source
    )
    times, pipelined = RoundTimes(STEP * steps), pipelined and not drafted
    return RoundReport(drafted, (row,) * rows, times, source, pipelined=pipelined, ended=ended)


def run(
    lengths: DraftLength,
    rounds: int,
    cost: Callable[[int], float],
    accepted: Callable[[int], int],
    rows: int = 1,
) -> list[int]:
    """Take rounds of one source, and return their draft lengths."""
    chosen = []
    for _ in range(rounds):
        drafted = lengths.choose(1_000, rows)
        stays = min(drafted, accepted(len(chosen)))
        lengths.on_round(a_round(drafted, stays, cost(drafted) if drafted else 1.0, rows=rows))
        chosen.append(drafted)
    return chosen
