"""The context of a proposer follows the rows of its group."""

import random
from collections.abc import Sequence
from typing import Any

from mlx_specdec.core.proposer import Aligned, align

from ..support.rows import row_of


class Columns:
    """A context that only knows whose positions it has, and counts what is copied."""

    def __init__(self, owners: list[int]) -> None:
        self.owners, self.copies = owners, 0

    def merge(self, other: "Columns") -> None:
        self.owners, self.copies = self.owners + other.owners, self.copies + 1

    def keep(self, places: Sequence[int]) -> None:
        self.owners, self.copies = [self.owners[place] for place in places], self.copies + 1


def opened(*numbers: int) -> list[Any]:
    """Rows with these numbers, and one context of them."""
    rows = [row_of([number], 9, number=number) for number in numbers]
    context: Any = Columns(list(numbers))
    place = Aligned(context, rows)
    for row in rows:
        row.state["draft"] = place
    return rows


def positions(rows: list[Any]) -> Any:
    """Align the rows, and check that each of them has its own positions."""
    made = align(rows, "draft")
    assert all(row.state["draft"] is made for row in rows)
    assert made.rows == rows
    assert made.context.owners == [row.number for row in rows]  # type: ignore[attr-defined]
    return made.context


def test_rows_that_leave_join_and_change_order_keep_their_own_columns() -> None:
    draws, count = random.Random(0), 4
    rows = opened(0, 1, 2, 3)
    for _ in range(200):
        rows = draws.sample(rows, draws.randint(1, len(rows)))
        for size in draws.choices(range(4), k=2):
            rows = rows + opened(*range(count, count + size))
            count += size
        draws.shuffle(rows)
        positions(rows)
