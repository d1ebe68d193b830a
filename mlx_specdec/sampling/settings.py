"""How tokens are drawn, as the user may ask for it; checked once. Imports no MLX."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real

from ..errors import OptionError

LARGEST = 1e20
"""Of what is added to logits: far above any logit, and sums of it stay far below float32's end."""
TEMPERATURES = (1e-30, 1e30)
LEAST_TOP_P = 1e-30
"""Far above the smallest number of float32."""
REPETITION_PENALTIES = (1e-6, 1e6)


@dataclass(frozen=True)
class Sampling:
    """Settings of the distribution that tokens are drawn from; the defaults change nothing.

    temperature: 0 means greedy, else within TEMPERATURES.
    top_k: 0 = off.
    top_p: 1 = off, at least LEAST_TOP_P.
    min_p: [0, 1), 0 = off.
    repetition_penalty: within REPETITION_PENALTIES, 1 = off; logits of tokens seen before are
        divided by it where positive and multiplied where negative (Keskar et al., arXiv 1909.05858,
        section 4.1).
    presence_penalty, frequency_penalty: subtracted once per token seen, and once per occurrence; at
        most LARGEST.
    logit_bias: added to the logits of single token ids; at most LARGEST, or -inf, which bans.
    xtc_probability: [0, 1], 0 = off, of excluding the top choices of a position.
    xtc_threshold: [0, 0.5], the probability above which a token is one of them.
    xtc_special_tokens: ids that are never excluded; None means none, and of an `options.Options`
        line ends and what ends a text.
    seed: decides at which positions they are.

    Raises OptionError for a value out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        coldest, hottest = TEMPERATURES
        least, most = REPETITION_PENALTIES
        between = f"lie between {coldest:g} and {hottest:g}"
        warm = coldest <= self.temperature <= hottest
        penalty = least <= self.repetition_penalty <= most
        small = f"be at most {LARGEST:g} in size"
        for name, holds, what in (
            ("temperature", self.temperature == 0 or warm, f"be 0 or {between}"),
            ("top_k", self.top_k >= 0, "be 0 (off) or more"),
            ("top_p", LEAST_TOP_P <= self.top_p <= 1, f"lie in [{LEAST_TOP_P:g}, 1]"),
            ("min_p", 0 <= self.min_p < 1, "lie in [0, 1)"),
            ("repetition_penalty", penalty, f"lie between {least:g} and {most:g}"),
            ("presence_penalty", abs(self.presence_penalty) <= LARGEST, small),
            ("frequency_penalty", abs(self.frequency_penalty) <= LARGEST, small),
            ("xtc_probability", 0 <= self.xtc_probability <= 1, "lie in [0, 1]"),
            ("xtc_threshold", 0 <= self.xtc_threshold <= 0.5, "lie in [0, 0.5]"),
        ):
            self._check(name, holds, what)
        for token, bias in self.logit_bias.items():
            if token < 0 or not (abs(bias) <= LARGEST or bias == -math.inf):
                raise OptionError(
                    f"logit-bias {token}={bias} is not usable: give a token id and a number of at "
                    f"most {LARGEST:g} in size, or -inf"
                )

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            shown = name.replace("_", "-").replace("simulated", "simulate")
            raise OptionError(f"{shown} must {what}, not {getattr(self, name)!r:.80}")

    @property
    def counts_tokens(self) -> bool:
        """Whether the distribution of a position depends on which tokens came before it."""
        added = self.presence_penalty != 0 or self.frequency_penalty != 0
        return added or self.repetition_penalty != 1

    @property
    def kind(self) -> tuple[object, ...]:
        """What the distribution for given logits depends on; seeds may differ."""
        return tuple(getattr(self, each.name) for each in fields(Sampling) if each.name != "seed")

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p may cut tokens away; at temperature 0 none does."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def integer(name: str, value: object) -> int:
    """A number as Python's own; numpy's are taken as well. Raises OptionError for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def number(name: str, value: object) -> float:
    """As `integer`, for numbers of any kind."""
    if not isinstance(value, Real):
        raise OptionError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} is too large for a number with a fraction") from None
