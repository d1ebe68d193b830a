"""The flags that change what is written: penalties, and what the text has to look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..sampling.grammar import LONGEST
from .flags import Flags, flag


@dataclass(frozen=True)
class Constraints(Flags):
    """What the text has to look like."""

    panel = "Constraints"
    json_schema: Path | None = flag(
        None, "A file with the JSON schema that the text has to fit.", metavar="FILE"
    )
    regex: str | None = flag(None, "The regular expression that the whole text has to match.")
    grammar: Path | None = flag(
        None,
        "A file with the grammar that the text has to follow, in llguidance's variant of Lark.",
        metavar="FILE",
    )

    def for_options(self) -> dict[str, Any]:
        return {
            "json_schema": _contents("--json-schema", self.json_schema),
            "regex": self.regex,
            "grammar": _contents("--grammar", self.grammar),
        }

    def digests(self) -> dict[str, str | None]:
        """What stands for each in settings that are compared."""
        told = self.for_options().items()
        return {name: text and sha256(text.encode()).hexdigest() for name, text in told}


def _contents(name: str, file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        with file.open(encoding="utf-8-sig") as stream:
            return stream.read(LONGEST + 1)
    except OSError as problem:
        raise OptionError(f"{name}: cannot read {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{name}: {file} is not UTF-8 text") from None


@dataclass(frozen=True)
class Penalties(Flags):
    """What changes the chances of single tokens, and what ends the text."""

    panel = "Sampling"
    xtc_probability: float = flag(
        0.0, "The share of positions whose top choices are excluded; 0 excludes none."
    )
    xtc_threshold: float = flag(
        0.1, "The probability above which all tokens but the least likely one are top choices."
    )
    repetition_penalty: float = flag(1.0, "The factor against earlier tokens; 1 is off.")
    presence_penalty: float = flag(0.0, "The amount subtracted from the logit of earlier tokens.")
    frequency_penalty: float = flag(0.0, "The amount subtracted for each time a token occurred.")
    logit_bias: list[str] | None = flag(
        None,
        "A value to add to the logit of one token id; the flag may be repeated.",
        metavar="ID=VALUE",
    )
    stop: list[str] | None = flag(
        None, "A string before which the text ends; the flag may be repeated."
    )
    extra_eos_token: list[str] | None = flag(
        None, "A token, or its id, that ends the text as well; the flag may be repeated."
    )

    def for_options(self) -> dict[str, Any]:
        return {
            **super().for_options(),
            "logit_bias": _biases(self.logit_bias or ()),
            "stop": tuple(self.stop or ()),
            "extra_eos_token": tuple(self.extra_eos_token or ()),
        }


def _biases(items: Sequence[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                f"--logit-bias must look like ID=VALUE, for example 42=-5, not {item!r}"
            ) from None
    return biases
