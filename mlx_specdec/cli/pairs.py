"""The table of pairs that are known to fit, pairs.json, and the command that shows it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import OptionError
from . import render
from .flags import Flags, Json, command, flag

AUTO = "auto"
"""The name of the draft model that the table has for the target."""
HOW_TO_CHOOSE = (
    "name a smaller model with the target's own tokenizer that takes less than a fifth of the "
    "target's time, or self, or --proposer ngram, which needs no draft"
)
NOTE = "The two tokenizers are compared token by token when a pair is loaded."
_TABLE = Path(__file__).resolve().parents[1] / "pairs.json"
_CONVERTED = re.compile(r"(-mlx)?(-[2-8]bit|-bf16|-fp16|-mxfp4|-mxfp8|-nvfp4|-dwq|-mlx)*$")
"""What conversions, such as those of mlx-community, append to a model's name."""


@dataclass(frozen=True)
class KnownPair:
    """A target and a draft that share a tokenizer. run: whether this program was run with them."""

    target: str
    target_billions: float
    draft: str
    draft_billions: float
    run: bool


@dataclass(frozen=True)
class Which(Flags):
    """Which pairs are shown."""

    panel = "Pairs"
    name: str | None = flag(
        None, "Show the pairs whose names have this in them.", argument=True, metavar="NAME"
    )


@command("mlx-specdec pairs qwen3")
def pairs(which: Which, output: Json) -> None:
    """Show targets and the draft models that fit them.

    --draft-model auto takes the draft from this table.
    """
    wanted = (which.name or "").lower()
    shown = [one for one in known_pairs() if wanted in f"{one.target} {one.draft}".lower()]
    if not shown:
        raise OptionError(f"the table has no pair with {which.name} in it: {HOW_TO_CHOOSE}")
    if output.json:
        text = render.as_json({"pairs": [asdict(one) for one in shown]})
    else:
        table = render.table("target", ">weights", "draft", ">weights", "run by us")
        for one in shown:
            table.add_row(
                one.target,
                _size(one.target_billions),
                one.draft,
                _size(one.draft_billions),
                "yes" if one.run else "not yet",
            )
        text = render.laid_out(sys.stdout, table, NOTE)
    render.write(sys.stdout, text)


def known_pairs() -> list[KnownPair]:
    """Return the table."""
    groups = json.loads(_TABLE.read_text(encoding="utf-8"))
    return [
        KnownPair(target, billions, group["draft"], group["billions"], group.get("run", False))
        for group in groups
        for target, billions in group["targets"].items()
    ]


def draft_for(target: str) -> str:
    """Return the draft model of a target, whoever converted that. Raises OptionError."""
    names = {_base(one.target): one.draft for one in known_pairs()}
    if _base(target) not in names:
        raise OptionError(f"the table of pairs has no draft for {target}: {HOW_TO_CHOOSE}")
    return names[_base(target)]


def _base(name: str) -> str:
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return _CONVERTED.sub("", last).removeprefix("meta-")


def _size(billions: float) -> str:
    return f"{billions:g} B" if billions >= 1 else f"{1000 * billions:g} M"
