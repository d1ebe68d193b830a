"""The user's sampling settings and their validation. Imports no MLX."""

from __future__ import annotations  # `options.Options` reads types as words

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real

from ..errors import OptionError

LARGEST_BIAS = 1e20
"""Largest magnitude of a bias or penalty. It exceeds any logit, and sums of it fit float32."""
TEMPERATURE_LIMITS = (1e-30, 1e30)
"""Least and greatest temperature above 0, both well inside the range of float32."""
LEAST_TOP_P = 1e-30
"""Least value of top-p, well above the smallest float32."""
REPETITION_PENALTIES = (1e-6, 1e6)
"""Least and greatest repetition penalty."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampling distribution. The defaults select greedy decoding without changes.

    Attributes:
        temperature: 0 means greedy; otherwise within TEMPERATURE_LIMITS.
        top_k: Number of tokens to keep; 0 = off.
        top_p: Probability mass to keep, at least LEAST_TOP_P; 1 = off.
        min_p: Least probability relative to the most likely token, in [0, 1]; 0 = off.
        repetition_penalty: Within REPETITION_PENALTIES; 1 = off. Positive logits of tokens in the
            prompt and the completion are divided by it, negative ones multiplied (Keskar et al.,
            arXiv 1909.05858, section 4.1).
        presence_penalty: Subtracted from the logit of every token in the completion; at most
            LARGEST_BIAS.
        frequency_penalty: Subtracted once per occurrence in the completion; at most LARGEST_BIAS.
        logit_bias: Added to logits by token id; at most LARGEST_BIAS, or -inf to ban a token.
        xtc_probability: Probability in [0, 1] that a position excludes its top choices; 0 = off.
        xtc_threshold: Probability in [0, 0.5] above which a token is a top choice.
        xtc_special_tokens: Ids that are never excluded. None means no ids here; in
            `options.Options` it means line ends and EOS tokens.
        seed: Determines the positions that exclude their top choices.

    Raises OptionError if a value is out of range."""

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
        coldest, hottest = TEMPERATURE_LIMITS
        least, most = REPETITION_PENALTIES
        between = f"lie between {coldest:g} and {hottest:g}"
        warm = coldest <= self.temperature <= hottest
        penalty = least <= self.repetition_penalty <= most
        small = f"be at most {LARGEST_BIAS:g} in size"
        for name, holds, what in (
            ("temperature", self.temperature == 0 or warm, f"be 0 or {between}"),
            ("top_k", self.top_k >= 0, "be 0 (off) or more"),
            ("top_p", LEAST_TOP_P <= self.top_p <= 1, f"lie in [{LEAST_TOP_P:g}, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "lie in [0, 1]"),
            ("repetition_penalty", penalty, f"lie between {least:g} and {most:g}"),
            ("presence_penalty", abs(self.presence_penalty) <= LARGEST_BIAS, small),
            ("frequency_penalty", abs(self.frequency_penalty) <= LARGEST_BIAS, small),
            ("xtc_probability", 0 <= self.xtc_probability <= 1, "lie in [0, 1]"),
            ("xtc_threshold", 0 <= self.xtc_threshold <= 0.5, "lie in [0, 0.5]"),
        ):
            self._check(name, holds, what)
        for token, bias in self.logit_bias.items():
            if token < 0 or not (abs(bias) <= LARGEST_BIAS or bias == -math.inf):
                raise OptionError(
                    f"logit-bias {token}={bias} is not usable: give a token id and a number of at "
                    f"most {LARGEST_BIAS:g} in size, or -inf"
                )

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            shown = name.replace("_", "-")
            raise OptionError(f"{shown} must {what}, not {getattr(self, name)!r:.80}")

    @property
    def counts_tokens(self) -> bool:
        """Whether penalties make a distribution depend on the earlier tokens."""
        added = self.presence_penalty != 0 or self.frequency_penalty != 0
        return added or self.repetition_penalty != 1

    @property
    def kind(self) -> tuple[object, ...]:
        """All settings but the seed. Equal kinds map equal logits to equal distributions."""
        names = (setting.name for setting in fields(Sampling))
        return tuple(getattr(self, name) for name in names if name != "seed")

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens; at temperature 0 they have no effect."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def integer(name: str, value: object) -> int:
    """Convert an integer of Python or numpy to int. Raises OptionError for any other value."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def number(name: str, value: object) -> float:
    """Convert a real number of Python or numpy to float. Raises OptionError for other values."""
    if not isinstance(value, Real):
        raise OptionError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} is too large for a number with a fraction") from None
