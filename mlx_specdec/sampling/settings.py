"""How tokens are drawn, as the user may ask for it; checked once. Imports no MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import OptionError


@dataclass(frozen=True)
class Sampling:
    """Settings of the distribution that tokens are drawn from; the defaults change nothing.

    temperature: 0 means greedy. top_k: 0 = off. top_p: (0, 1], 1 = off. min_p: [0, 1), 0 = off.
    repetition_penalty: > 0, 1 = off; logits of tokens seen before are divided by it where positive
        and multiplied where negative (Keskar et al., arXiv 1909.05858, section 4.1).
    presence_penalty, frequency_penalty: subtracted once per token seen, and once per occurrence.
    logit_bias: added to the logits of single token ids.

    Raises OptionError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature must be 0 or more, not {self.temperature}",
        )
        _require(self.top_k >= 0, f"top-k must be 0 (off) or more, not {self.top_k}")
        _require(0 < self.top_p <= 1, f"top-p must lie in (0, 1], not {self.top_p}")
        _require(0 <= self.min_p < 1, f"min-p must lie in [0, 1), not {self.min_p}")
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition-penalty must be above 0, not {self.repetition_penalty}",
        )
        for name, value in (
            ("presence-penalty", self.presence_penalty),
            ("frequency-penalty", self.frequency_penalty),
        ):
            _require(math.isfinite(value), f"{name} must be a finite number, not {value}")
        for token, bias in self.logit_bias.items():
            _require(
                token >= 0 and not math.isnan(bias), f"logit-bias {token}={bias} is not usable"
            )

    @property
    def counts_tokens(self) -> bool:
        """Whether the distribution of a position depends on which tokens came before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise OptionError(sentence)
