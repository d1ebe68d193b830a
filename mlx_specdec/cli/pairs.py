"""The table of matching pairs in pairs.json, the choice of pairs that fit into this machine's
memory, and the command that shows both."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import process
from ..checkpoints.disk import show
from ..errors import OptionError
from . import render
from .flags import Flags, Json, command, flag, group

if TYPE_CHECKING:
    from rich.table import Table

    from ..measure.prediction import Estimate

AUTO = "auto"
"""As a draft model, this name means the table's draft for the target. As a target, it means the
best pair that fits."""
USES = ("chat", "code")
"""The uses for which `--model auto` chooses a pair. The first one is the default."""
TOKENS = 8192
"""The number of tokens in the KV caches for which a pair must have enough memory."""
BITS = (4, 8, 16)
SYSTEM_BYTES = 4 * 10**9
SYSTEM_SHARE = 0.35
"""The memory of a Mac that `--model auto` leaves to macOS and other programs: at least this many
bytes, and at least this share. Macs whose models took more have frozen."""
SECONDS = 15.0
"""Limit of the seconds for the estimate of one pair."""
COLUMNS = ("target", *(f"{bits} bits" for bits in BITS), "draft", "drafters on hidden states")
DISPENSABLE = (COLUMNS[-1], *(f"{bits} bits" for bits in reversed(BITS)))
"""Columns that are left out on a narrow terminal, in this order."""
HOW_TO_CHOOSE = (
    "name a smaller model with the target's own tokenizer that takes less than a fifth of the "
    "target's time, or self, or --proposer ngram, which needs no draft"
)
NOTE = (
    "Sizes, which a wide terminal shows, are those of both models at so many bits and of caches of "
    "8k tokens; those in parentheses do not fit. This program was tested with the two pairs in "
    "weights/; the others are listed for their published sizes and tokenizers. Loading a pair "
    "compares both tokenizers token by token, and estimate measures any pair."
)
SLOW_ROWS = (
    "The GPU of an M1 or M2 reads quantized weights once for every row of a pass, so drafts of a "
    "model gain little there or lose. Lookup (--proposer ngram) still pays where text repeats."
)
WIDE_KERNELS = 15
"""The first generation of Apple's GPUs (M3) on which a pass over a few rows costs little more than
a pass over one row."""
_TABLE = Path(__file__).resolve().parents[1] / "pairs.json"
_CONVERTED = re.compile(r"(-mlx)?(-[2-8]bit|-bf16|-fp16|-mxfp4|-mxfp8|-nvfp4|-dwq|-mlx)*$")
"""Matches the endings that conversions, such as mlx-community's, append to a model's name."""


@dataclass(frozen=True)
class KnownModel:
    """A model of the table.

    Attributes:
        billions: Billions of weights, as stated by the publisher.
        kib: KiB of the 16-bit KV cache per token: 4 x layers x KV heads x head width / 1024. If
            layers have a window, this is the mean over 8k tokens.
        config: The keys of config.json that decide the model's shapes, or {} if the table has none.
        converted: Whether mlx-community has published it at 4 and 8 bits."""

    name: str
    billions: float
    kib: float
    config: Mapping[str, Any] = field(default_factory=dict)
    converted: bool = False

    def nbytes(self, bits: int) -> int:
        """Return the bytes that this machine needs for the weights and the KV cache. bits: Bits per
        weight."""
        from ..models.number_format import NumberFormat, on_cpu

        count, width = int(1e9 * self.billions), 4 if on_cpu() else 2
        weights = count * bits // 8 + count // 64 * 2 * width  # a scale and a bias for 64 weights
        if bits == max(BITS) or NumberFormat(q_bits=bits).expands(count):
            weights = count * width
        return weights + int(TOKENS * self.kib * 512 * width)

    def source(self, bits: int) -> tuple[str, int | None]:
        """Return the name to load, and the bits for quantization on load, or None."""
        if self.converted and bits in BITS[:2]:
            return f"mlx-community/{self.name.rpartition('/')[2]}-{bits}bit", None
        return self.name, None if bits == max(BITS) else bits

    def download(self, bits: int) -> int:
        """Estimate the bytes of the files that `source` names on the Hub."""
        stored = max(BITS) if self.source(bits)[0] == self.name else bits + 0.5
        return int(1e9 * self.billions * stored / 8)


@dataclass(frozen=True)
class KnownPair:
    """A target and a draft model with the same tokenizer.

    Attributes:
        run: Whether this program was tested with the pair.
        drafters: Names of hidden-state drafters for the target, by kind.
        use: One of USES, or ""."""

    target: KnownModel
    draft: KnownModel
    run: bool
    drafters: Mapping[str, str]
    use: str

    def nbytes(self, bits: int) -> int:
        """Return the bytes of both models with `bits` bits per weight, and of their caches."""
        return self.target.nbytes(bits) + self.draft.nbytes(bits)

    def line(self, bits: int, command: str = "chat") -> str:
        """Return the command line that names the pair."""
        words = [f"mlx-specdec {command}"]
        for which, one in (("", self.target), ("draft-", self.draft)):
            name, q_bits = one.source(bits)
            words.append(f"--{which}model {name}")
            words += [f"--{which}q-bits {q_bits}"] if q_bits else []
        return " ".join(words)

    def estimate(self, bits: int) -> Estimate | None:
        """Return an estimate of the pair's speed, or None if the table has no shapes of it."""
        if not self.target.config:
            return None
        from ..measure.estimate import ModelSource, estimate

        q_bits = None if bits == max(BITS) else bits
        with render.progress(f"measuring the shapes of {self.target.name}") as report:
            sides = (
                ModelSource(one.name, one.config, q_bits=q_bits)
                for one in (self.target, self.draft)
            )
            return estimate(*sides, seconds=SECONDS, progress=report)


def room(auto: bool = False) -> int:
    """Return the bytes that models and caches may take on this machine. Passes need the rest. auto:
    Return the lower limit for `--model auto`. On a CPU, where large models are slow, it is a
    quarter. On a Mac's GPU, SYSTEM_BYTES and SYSTEM_SHARE are left to macOS."""
    import mlx.core as mx

    from ..checkpoints import disk
    from ..engine.memory import RESERVE
    from ..models.number_format import EXPANDED_SHARE, on_cpu

    nbytes = (1 - RESERVE) * disk.usable_memory()
    if auto and on_cpu():
        nbytes *= EXPANDED_SHARE
    elif auto and mx.metal.is_available():
        memory = disk.memory()
        nbytes = min(nbytes, memory - max(SYSTEM_BYTES, SYSTEM_SHARE * memory))
    return max(0, int(nbytes))


def has_slow_rows() -> bool:
    """Return whether this is a Mac whose GPU reads quantized weights again for every row."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return False
    name = str(mx.device_info(mx.gpu)["architecture"])  # such as "applegpu_g14s"
    found = re.search(r"_g(\d+)", name)
    return found is not None and int(found[1]) < WIDE_KERNELS


def best(
    pairs: Sequence[KnownPair], bits: Sequence[int], nbytes: int
) -> tuple[KnownPair, int] | None:
    """Return the pair with the largest target that fits into `nbytes`, and the most bits per weight
    with which it fits, or None if no pair fits."""
    fitting = [(one, n) for one in pairs for n in bits if one.nbytes(n) <= nbytes]
    return max(fitting, key=lambda pair: (pair[0].target.billions, pair[1]), default=None)


def best_for(use: str, q_bits: int | None = None) -> tuple[KnownPair, int]:
    """Return the pair for `--model auto`, and the bits per weight. Raises OptionError if none fits.
    q_bits: The bits that the user has chosen, or None."""
    if use not in USES:
        raise OptionError(f"--model auto is for chat or code: give auto or auto:code, not {use!r}")
    pairs, nbytes = [one for one in known_pairs() if one.use == use], room(auto=True)
    if found := best(pairs, BITS[:2] if q_bits is None else (q_bits,), nbytes):
        return found
    least = min(one.nbytes(q_bits or BITS[0]) for one in pairs)
    raise OptionError(
        f"no pair for {use} fits: the smallest takes {show(least)} with {TOKENS:,} tokens, and "
        f"{show(nbytes)} are there; name a smaller model with --model"
    )


@group("Pairs")
class Which(Flags):
    name: str | None = flag(
        None, "Show the pairs whose names have this in them.", argument=True, metavar="NAME"
    )


@command("mlx-specdec pairs", "mlx-specdec pairs qwen3", "mlx-specdec chat --model auto:code")
def pairs(which: Which, output: Json) -> None:
    """Show targets and drafts that fit this machine.

    Nothing is downloaded. --draft-model auto takes the draft from this table, --model auto and
    auto:code take the best pair for chat and for code."""
    wanted, limit = (which.name or "").lower(), room()
    found = [
        one for one in known_pairs() if wanted in f"{one.target.name} {one.draft.name}".lower()
    ]
    if not found:
        raise OptionError(f"the table has no pair with {which.name} in it: {HOW_TO_CHOOSE}")
    shown = [one for one in found if wanted or one.nbytes(BITS[0]) <= limit]
    text = f"This machine ({process.device_name()}) has {show(limit)} for models and caches."
    if has_slow_rows():
        text += f" {SLOW_ROWS}"
    if hidden := len(found) - len(shown):
        text += f" Left out are {hidden} larger targets; mlx-specdec pairs NAME shows them."
    if not output.json:
        rows = [_row(one, limit) for one in shown]
        table = render.fitted(sys.stdout, COLUMNS, DISPENSABLE, partial(_table, rows))
        render.lay_out(sys.stdout, text)
        render.lay_out(sys.stdout, table, wrap=False)
        render.lay_out(sys.stdout, NOTE)
    groups = {use: [one for one in shown if one.use == use] for use in USES}
    chosen = []
    for use, some in ({which.name: shown} if which.name else groups).items():
        if (choice := best(some, BITS[:2], room(auto=not which.name))) is None:
            render.tell(f"no pair for {use} fits")
            continue
        one, bits = choice
        # An estimate takes long, so make one only if the user named the pair.
        expected = one.estimate(bits) if which.name else None
        about = {"for": use, "bits": bits, "command": one.line(bits)}
        chosen.append(
            {**about, **_payload(one, limit), "estimate": expected and expected.as_dict()}
        )
        if not output.json:
            lines = "\n".join(_advice(use, one, bits, expected))
            render.write(sys.stdout, f"\n{lines}\n")
    if output.json:
        rows = [_payload(one, limit) for one in found]
        machine = {"device": process.device_name(), "memory_bytes": limit}
        render.write(sys.stdout, render.as_json({**machine, "best": chosen, "pairs": rows}))


def _row(one: KnownPair, limit: int) -> dict[str, str]:
    """Return the cells of a pair by column. limit: Sizes above this are put in parentheses."""
    sizes = {bits: one.nbytes(bits) for bits in BITS}
    return {
        "target": one.target.name,
        **{
            f"{n} bits": show(size) if size <= limit else f"({show(size)})"
            for n, size in sizes.items()
        },
        "draft": one.draft.name,
        "drafters on hidden states": ", ".join(one.drafters),
    }


def _table(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> Table:
    """Return a table of these columns. Names are not wrapped, so that they can be copied."""
    table = render.table(*(f">{name}" if name.endswith("bits") else name for name in columns))
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _advice(use: str, one: KnownPair, bits: int, found: Estimate | None) -> Iterator[str]:
    yield f"For {use}: {one.target.name} at {bits} bits, {show(one.nbytes(bits))}."
    yield f"  {one.line(bits)}"
    if found is not None and (speeds := found.speeds) is not None:
        low, high = (next(p for p in speeds.predictions if p.alpha == a) for a in (0.6, 0.8))
        gain = f"{low.speed_up:.2f} to {high.speed_up:.2f} times that with"
        gain = "no gain from" if high.speed_up <= 1 else gain
        yield (
            f"  estimate expects {1 / speeds.step_seconds:.1f} tokens/s without drafts, and {gain} "
            "drafts of which 60 to 80 % are accepted."
        )
    elif one.target.config:
        short = f"{SECONDS:g} s were too short to measure it. " if found is not None else ""
        yield f"  {short}What it gains here: {one.line(bits, 'estimate')}"
    if one.drafters:
        names = ", ".join(f"{name} ({kind})" for kind, name in one.drafters.items())
        yield f"  Other drafts for --draft-model: {names}."


def _payload(one: KnownPair, limit: int) -> dict[str, Any]:
    return {
        "target": one.target.name,
        "target_billions": one.target.billions,
        "draft": one.draft.name,
        "draft_billions": one.draft.billions,
        "run": one.run,
        "drafters": one.drafters,
        "bytes": {bits: one.nbytes(bits) for bits in BITS},
        "fits": [bits for bits in BITS if one.nbytes(bits) <= limit],
    }


def known_pairs() -> list[KnownPair]:
    """Return the pairs of the table."""
    return [
        KnownPair(
            _model(name, group, entry, "config"),
            _model(group["draft"], group, group, "draft_config"),
            group.get("run", False),
            entry.get("drafters", {}),
            group.get("use", ""),
        )
        for group in json.loads(_TABLE.read_text(encoding="utf-8"))
        for name, entry in group["targets"].items()
    ]


def _model(
    name: str, group: Mapping[str, Any], entry: Mapping[str, Any], config: str
) -> KnownModel:
    merged = {**group.get("config", {}), **entry[config]} if config in entry else {}
    converted = group.get("converted", False)
    return KnownModel(name, entry["billions"], entry["kib"], merged, converted)


def draft_for(target: str) -> str:
    """Return the table's draft model for a target, or the last one if there are several. The target
    may be a conversion of the model in the table. Raises OptionError if there is none."""
    names = {_base(one.target.name): one.draft.name for one in known_pairs()}
    if _base(target) not in names:
        raise OptionError(f"the table of pairs has no draft for {target}: {HOW_TO_CHOOSE}")
    return names[_base(target)]


def _base(name: str) -> str:
    """Return the name of a model without its owner and the endings of conversions."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return _CONVERTED.sub("", last).removeprefix("meta-")
