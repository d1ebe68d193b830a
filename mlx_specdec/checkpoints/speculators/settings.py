"""What a drafter's config.json says, name by name, each value looked at before it is believed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..keys import LARGEST


class Settings:
    """parts: of one configuration; the first that has a name, and not as null, says what it is."""

    def __init__(self, file: Path, *parts: object) -> None:
        self.file = file
        self._parts = [part for part in parts if isinstance(part, Mapping)]

    def get(self, name: str) -> Any:
        """The value as it stands; None where there is none."""
        values = (part.get(name) for part in self._parts)
        return next((value for value in values if value is not None), None)

    def whole(
        self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST
    ) -> int:
        """A whole number. Raises CheckpointError, as all that follow."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def above_zero(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where there is none, or an empty one, as in templates."""
        value = self.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise self.wrong(name, "a list of whole numbers")
        return tuple(value)

    @property
    def dtype(self) -> str:
        """Of the weights, as safetensors writes it; F32 where nothing says it."""
        said = str(self.get("dtype") or self.get("torch_dtype") or "").rpartition(".")[2]
        return {"float16": "F16", "bfloat16": "BF16"}.get(said, "F32")

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """That what the file says under a name is something else."""
        value = self.get(name)
        said = "nothing" if value is None else f"{value!a:.60}"
        return CheckpointError(f"{self.file} says {said} for {name}: it has to be {wanted}")


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what stands in `dflash_config`, which goes before the rest."""
    inner = config.get("dflash_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def is_named(config: Mapping[str, Any], pattern: str) -> bool:
    """Whether one of the architectures looks so, in whole."""
    listed = config.get("architectures")
    return isinstance(listed, list) and any(re.fullmatch(pattern, str(one)) for one in listed)
