"""The command that shows the table of matching pairs, and a choice for a machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..engine.known_pairs import (
    BITS,
    USES,
    KnownPair,
    Machine,
    best,
    known_pairs,
    mac,
    this_machine,
)
from ..errors import OptionError
from ..system import show_size
from . import render
from .flags import Flags, Json, command, flag

if TYPE_CHECKING:
    pass

DISPENSABLE_COLUMNS = dict.fromkeys(("others", "16 bits", "measured by"), "")
DISPENSABLE_COLUMNS |= {"draft": "kind", **dict.fromkeys(("8 bits", "gain", "4 bits"), "")}
"""Columns that are left out on a narrow terminal, in this order. The kind of the draft is shown if
its name is left out."""
PAIRS_NOTE = (
    "Sizes are those of target and draft at so many bits and of caches of 8k tokens; those in "
    "parentheses do not fit. Gains are speeds relative to plain decoding, for "
    "chat and code, at the most bits that fit. Others have measured them with their own programs; "
    "(1.5) is an estimate from published tokens per round, or from usual ones. A wide terminal "
    "shows the names of drafts, which --draft-model auto takes. This program was tested with the "
    "two pairs in weights/. Loading a pair compares both tokenizers token by token, and bench "
    "measures any pair."
)
SLOW_ROWS = (
    "The GPU of an M1 or M2 reads quantized weights once for every row of a pass, so drafts of a "
    "model gain little there or lose. Lookup (--proposer ngram) still pays where text repeats."
)
WIDE_KERNELS = 15
"""The first generation of Apple's GPUs (M3) on which a pass over a few rows costs little more than
a pass over one row."""


def has_slow_rows() -> bool:
    """Return whether this is a Mac whose GPU reads quantized weights again for every row."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return False
    name = str(mx.device_info(mx.gpu)["architecture"])  # such as "applegpu_g14s"
    found = re.search(r"_g(\d+)", name)
    return found is not None and int(found[1]) < WIDE_KERNELS


class Which(Flags, panel="Pairs"):
    name: str | None = flag(
        None, "Show the pairs whose names contain this word.", argument=True, metavar="NAME"
    )
    memory: str | None = flag(
        None, "Show what a Mac with this memory can run, such as 32GB.", metavar="SIZE"
    )


@command("mlx-specdec pairs", "mlx-specdec pairs qwen3", "mlx-specdec pairs --memory 32GB")
def pairs(which: Which, output: Json) -> None:
    """Show targets and drafts that fit a machine.

    Nothing is downloaded. --draft-model auto takes the draft from this table, --model auto and
    auto:code take the pair with the largest gain for chat and for code."""
    wanted = (which.name or "").lower()
    machine = this_machine() if which.memory is None else mac(which.memory)
    limit = machine.room
    table = known_pairs()
    found = [one for one in table if wanted in f"{one.target.name} {one.draft.name}".lower()]
    if not found:
        raise OptionError(f"no pair with {which.name} in its names: mlx-specdec pairs lists all")
    shown = [one for one in found if wanted or one.nbytes(BITS[0], machine.on_cpu) <= limit]
    targets = {
        name: [one for one in found if one.target.name == name]
        for name in dict.fromkeys(one.target.name for one in shown)
    }
    subject = "This machine" if which.memory is None else "Such a machine"
    text = f"{subject} ({machine.name}) has {show_size(limit)} for models and caches."
    if which.memory is None and has_slow_rows():
        text += f" {SLOW_ROWS}"
    if hidden := len({one.target.name for one in found}) - len(targets):
        text += f" Left out are {hidden} larger targets; mlx-specdec pairs NAME shows them."
    if not output.json:
        rows = [_row(several, machine) for several in targets.values()]
        fitted = render.fitted(sys.stdout, rows, DISPENSABLE_COLUMNS)
        render.lay_out(sys.stdout, text)
        render.lay_out(sys.stdout, fitted, wrap=False)
        render.lay_out(sys.stdout, PAIRS_NOTE)
    groups = [(use, use, [one for one in shown if use in one.uses]) for use in USES]
    if which.name:
        groups = [(which.name, USES[0], shown)]
        machine = replace(machine, auto_room=machine.room)
    chosen = []
    for use, purpose, some in groups:
        if (choice := best(some, purpose, machine)) is None:
            render.tell(f"no pair for {use} fits")
            continue
        one, bits = choice
        about = {"for": use, "bits": bits, "command": command_line(one, bits)}
        chosen.append({**about, **_payload(one, machine)})
        if not output.json:
            lines = "\n".join(_advice(use, purpose, one, bits, machine))
            render.write(sys.stdout, f"\n{lines}\n")
    if output.json:
        rows = [_payload(one, machine) for one in found]
        about = {"device": machine.name, "memory_bytes": limit}
        render.write(sys.stdout, render.as_json({**about, "best": chosen, "pairs": rows}))


def _row(several: Sequence[KnownPair], machine: Machine) -> dict[str, str]:
    """Return the cells of a target by column. several: All pairs of the target. The row shows the
    pair with the largest gain."""

    def fitting(one: KnownPair) -> int:
        fits = (n for n in BITS[1::-1] if one.nbytes(n, machine.on_cpu) <= machine.room)
        return next(fits, BITS[0])

    one = max(several, key=lambda one: one.gain(fitting(one), USES[0]) or 0)
    gains = {use: one.gain(fitting(one), use) for use in USES}
    shown = [  # estimates are in parentheses
        f"({gain:.1f})" if one.published_gain(fitting(one), use) is None else f"{gain:.2f}"
        for use, gain in gains.items()
        if gain is not None
    ]
    sizes = {f"{n} bits": one.nbytes(n, machine.on_cpu) for n in one.target.bits}
    return {
        "target": one.target.name,
        **dict.fromkeys((f"{n} bits" for n in BITS), ""),
        **{
            column: show_size(size) if size <= machine.room else f"({show_size(size)})"
            for column, size in sizes.items()
        },
        "draft": one.draft.name,
        "kind": one.kind,
        "gain": " / ".join(dict.fromkeys(shown)),
        "measured by": _by(one) if one.gains else "",
        "others": ", ".join(pair.kind for pair in several if pair is not one),
    }


def _by(one: KnownPair) -> str:
    """Return the publisher of a pair's figures, and the machine."""
    return " on ".join(filter(None, map((one.source or {}).get, ("by", "machine"))))


def command_line(one: KnownPair, bits: int, command: str = "chat") -> str:
    """Return the command line that names a pair."""
    words = ["mlx-specdec", command]
    sources = {"": one.target.source(bits), "draft-": one.draft_source(bits)}
    for which, (name, q_bits) in sources.items():
        words += [f"--{which}model", name, *([f"--{which}q-bits", str(q_bits)] if q_bits else [])]
    return " ".join(words)


def told_gain(one: KnownPair, bits: int, use: str) -> str:
    """Return a sentence on the gain of a pair and on who has measured it."""
    gain = one.gain(bits, use)
    if gain is None:
        return "nobody has published what it gains"
    if one.source is not None and one.published_gain(bits, use) is not None:
        source = f"{_by(one)}, {one.source['date']}, {one.source['where']}"
        return f"{gain:.2f} times plain decoding for {use}, measured by {source}"
    basis = f", from figures by {_by(one)}" if one.source else ""
    return f"about {gain:.1f} times plain decoding for {use}, an estimate{basis}"


def _advice(heading: str, use: str, one: KnownPair, bits: int, machine: Machine) -> Iterator[str]:
    size = show_size(one.nbytes(bits, machine.on_cpu))
    yield f"For {heading}: {one.target.name} at {bits} bits, {size}."
    yield f"  {command_line(one, bits)}"
    yield f"  Gain: {told_gain(one, bits, use)}."
    if one.kind != "mtp":
        yield f"  What it gains here: {command_line(one, bits, 'estimate')}"


def _payload(one: KnownPair, machine: Machine) -> dict[str, Any]:
    sizes = {bits: one.nbytes(bits, machine.on_cpu) for bits in BITS if bits in one.target.bits}
    return {
        "target": one.target.name,
        "target_billions": one.target.billions,
        "draft": one.draft.name,
        "draft_billions": one.draft.billions,
        "kind": one.kind,
        "run": one.run,
        "gains": one.gains,
        "estimated_gains": {
            use: {bits: one.gain(bits, use) for bits in one.target.bits} for use in USES
        },
        "source": one.source,
        "bytes": sizes,
        "fits": [bits for bits, size in sizes.items() if size <= machine.room],
    }
