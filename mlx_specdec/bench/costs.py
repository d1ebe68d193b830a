"""What is timed between the texts of a benchmark: passes over 1 .. m tokens, and draft steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from ..assemble import Pair
from ..costs.passes import Clock, PassTimer, opened
from ..errors import PromptError
from .methods import Length

ALWAYS_TIMED = 9
"""Passes over 1 .. ALWAYS_TIMED tokens are always measured: that is where V bends."""
TURNS = 20
"""Fewer turns than this leave medians that jump."""


def pass_timer(
    pair: Pair, prompt: Sequence[int], lengths: Sequence[Length], clock: Clock = time.perf_counter
) -> PassTimer:
    """Times passes behind a prompt, those of rounds with `lengths` drafted tokens among them.

    Turns belong between the texts that the costs are held against, so that both see the same
    machine. A draft that cannot take the prompt is left out, as it abstains while decoding;
    raises PromptError where the target cannot.
    """
    draft = None
    if pair.draft is not None:
        fed = prompt if pair.translation is None else pair.translation.feed(prompt)
        with suppress(PromptError):
            draft = opened(pair.draft, fed)
    sizes = sorted({*range(1, ALWAYS_TIMED + 1), *(n + 1 for n in lengths if n != "auto")})
    return PassTimer(opened(pair.target, prompt), sizes=sizes, draft=draft, clock=clock)
