"""How grammars are read: beside each other, and without a trace."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from mlx_specdec.sampling.grammar import with_stack


def test_readers_at_the_same_time_leave_the_size_of_stacks_as_it_was() -> None:
    before = threading.stack_size()
    both_began, first_ended = threading.Barrier(2, timeout=30), threading.Event()

    def first() -> None:
        with_stack(both_began.wait)
        first_ended.set()

    def second() -> None:
        with_stack(lambda: (both_began.wait(), first_ended.wait(30)))

    with ThreadPoolExecutor(2) as threads:
        for each in (threads.submit(first), threads.submit(second)):
            each.result()
    try:
        assert threading.stack_size() == before
    finally:
        threading.stack_size(before)
