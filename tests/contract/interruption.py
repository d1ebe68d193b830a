"""What ends a command early, at a chosen point instead of a chosen time: Ctrl-C and a full disk."""

import itertools
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest


@contextmanager
def interrupted(when: Callable[[int], bool]) -> Iterator[None]:
    """Raise KeyboardInterrupt once, as soon as MLX is asked to compute and `when` returns True for
    the number of times that MLX was asked."""
    waits = True

    def ask(asked: int) -> None:
        nonlocal waits
        if waits and when(asked):
            waits = False
            raise KeyboardInterrupt

    with each_computation(ask):
        yield
    assert not waits, "the moment to interrupt never came"


@contextmanager
def each_computation(call: Callable[[int], object]) -> Iterator[None]:
    """Call a function each time that MLX is asked to compute, with the number of times so far."""
    count = itertools.count(1)

    def calling(compute: Any) -> Any:
        def called(*arrays: Any) -> Any:
            call(next(count))
            return compute(*arrays)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, calling(getattr(mx, name)))
        yield


@contextmanager
def full_disk(size: int = 0) -> Iterator[None]:
    """Let every write fail that would make a file larger than this many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
