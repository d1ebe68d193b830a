"""The settings of decoder-only models' KV caches. This module imports no MLX."""

from dataclasses import dataclass

from ..errors import OptionError, check_one_of

CACHE_BITS, CACHE_GROUP_SIZES = (2, 3, 4, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class CacheSettings:
    """Settings of a decoder-only model's KV cache.

    Attributes:
        bits: Quantize keys and values to 2, 3, 4, 6 or 8 bits; None does not quantize.
        group_size: The number of values that share a scale: 32, 64 or 128.
        max_size: The number of newest tokens that a layer remembers; None for all that the model's
            own cache keeps.

    Raises:
        OptionError: No model can use the values.
    """

    bits: int | None = None
    group_size: int = 64
    max_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_one_of("kv-bits", self.bits, CACHE_BITS)
        check_one_of("kv-group-size", self.group_size, CACHE_GROUP_SIZES)
        if self.max_size is not None and self.max_size < 1:
            raise OptionError(f"max-kv-size must be 1 or more, not {self.max_size}")
        if self.bits is not None and self.max_size is not None:
            raise OptionError("kv-bits and max-kv-size exclude each other: leave one of them out")


OWN_CACHES = CacheSettings()
"""The settings that leave a model the caches that it brings."""
