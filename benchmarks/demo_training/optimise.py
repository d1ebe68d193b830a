"""The training loop: a budget of minutes or steps, cosine learning rate, resumable.

Matrices are stepped by Muon (Jordan et al. 2024, github.com/KellerJordan/Muon) with updates scaled
to AdamW's size, everything else by AdamW. Computation in bfloat16, weights in float32.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARM_UP_STEPS = 60
SAVE_EVERY_SECONDS = 240


@dataclass(frozen=True)
class Budget:
    """How long to train: minutes of wall time, or steps."""

    minutes: float | None = None
    steps: int | None = None

    def used(self, seconds: float, steps: int) -> float:
        """Share of the budget, 0 to 1 and beyond."""
        shares = []
        if self.minutes is not None:
            shares.append(seconds / (60 * self.minutes))
        if self.steps is not None:
            shares.append(steps / self.steps if self.steps else 1.0)
        return max(shares, default=1.0)


def train(
    model: nn.Module,
    epochs: Callable[[int], Iterator[Any]],
    loss: Callable[[Any], torch.Tensor],
    *,
    rate: float,
    budget: Budget,
    state: Path,
) -> int:
    """Train the parameters of `model` that want gradients; returns the number of steps.

    epochs: the batches of epoch number n. loss: mean loss of one batch. state: where progress is
    kept; if the file exists, training goes on from there. It is removed by the caller.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimisers = _optimisers(model, rate)
    steps, epoch, seconds = 0, 0, 0.0
    if state.exists():
        steps, epoch, seconds = _restore(state, trained, optimisers)
    last = saved = time.monotonic()
    total, count = 0.0, 0
    while True:
        for batch in epochs(epoch):
            now = time.monotonic()
            seconds, last = seconds + now - last, now
            share = budget.used(seconds, steps)
            if share >= 1:
                _save(state, trained, optimisers, (steps, epoch, seconds))
                return steps
            _set_rate(optimisers, rate * _schedule(share, steps))
            value = _step(loss, batch, trained, optimisers)
            total, count, steps = total + value, count + 1, steps + 1
            if count == 50:
                left = seconds * (1 / max(budget.used(seconds, steps), 1e-6) - 1)
                print(
                    f"step {steps}, loss {total / count:.3f}, {left / 60:.1f} minutes left",
                    file=sys.stderr,
                    flush=True,
                )
                total, count = 0.0, 0
            if now - saved > SAVE_EVERY_SECONDS:
                _save(state, trained, optimisers, (steps, epoch, seconds))
                saved = now
        epoch += 1


def _step(
    loss: Callable[[Any], torch.Tensor],
    batch: Any,
    trained: list[nn.Parameter],
    optimisers: list[torch.optim.Optimizer],
) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(batch)
    value.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return value.item()


def _optimisers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    matrices, rest = [], []
    for weight in model.parameters():
        if weight.requires_grad:
            is_matrix = weight.ndim == 2 and id(weight) not in tables
            (matrices if is_matrix else rest).append(weight)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(
            torch.optim.Muon(
                matrices, lr=rate, weight_decay=0.01, ns_steps=3, adjust_lr_fn="match_rms_adamw"
            )
        )
    if rest:
        found.append(torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0))
    return found


def _schedule(share: float, steps: int) -> float:
    return min(1.0, (steps + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * share))


def _set_rate(optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate


def _save(
    state: Path,
    trained: list[nn.Parameter],
    optimisers: list[torch.optim.Optimizer],
    progress: tuple[int, int, float],
) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    unfinished = state.with_suffix(".unfinished")
    torch.save(
        {
            "weights": [weight.detach() for weight in trained],
            "optimisers": [optimiser.state_dict() for optimiser in optimisers],
            "progress": progress,
        },
        unfinished,
    )
    os.replace(unfinished, state)


def _restore(
    state: Path, trained: list[nn.Parameter], optimisers: list[torch.optim.Optimizer]
) -> tuple[int, int, float]:
    saved = torch.load(state, weights_only=True)
    with torch.no_grad():
        for weight, value in zip(trained, saved["weights"], strict=True):
            weight.copy_(value)
    for optimiser, value in zip(optimisers, saved["optimisers"], strict=True):
        optimiser.load_state_dict(value)
    steps, epoch, seconds = saved["progress"]
    return steps, epoch + 1, seconds
