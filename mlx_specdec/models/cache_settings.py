"""The settings of decoder-only models' KV caches. Imports no MLX."""

from dataclasses import dataclass

from ..errors import OptionError

BITS, GROUP_SIZES = (2, 3, 4, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class CacheSettings:
    """bits: quantize keys and values, in groups of group_size. max_size: how many of the newest
    tokens a layer remembers. None leaves a model the caches that it makes. Raises OptionError for
    values that no model can use."""

    bits: int | None = None
    group_size: int = 64
    max_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in BITS:
            listed = ", ".join(map(str, BITS))
            raise OptionError(f"kv-bits must be one of {listed}, not {self.bits}")
        if self.group_size not in GROUP_SIZES:
            listed = ", ".join(map(str, GROUP_SIZES))
            raise OptionError(f"kv-group-size must be one of {listed}, not {self.group_size}")
        if self.max_size is not None and self.max_size < 1:
            raise OptionError(f"max-kv-size must be 1 or more, not {self.max_size}")
        if self.bits is not None and self.max_size is not None:
            raise OptionError("kv-bits and max-kv-size exclude each other: leave one of them out")
