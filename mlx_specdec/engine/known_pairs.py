"""The table of matching pairs in pairs.json, their speeds, and the choice of a pair to run.

Importing this module does not import MLX."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import system
from ..errors import OptionError
from ..system import parse_size, show_size

AUTO = "auto"
"""As a draft model, this name means the table's best draft for the target. As a target, it means
the best pair that fits."""
USES = ("chat", "code")
"""The uses for which `--model auto` chooses a pair. The first one is the default."""
FAST = "fast"
"""With this word in place of a use, `--model auto` takes the fastest pair for the first use."""
ENOUGH = 20.0
"""Tokens per second that a pair must reach if `--model auto` is to prefer it for its quality."""
SAME = 0.9
"""Speeds from this share of the largest one on count as equal, as published figures scatter."""
DRAFT, MTP = "draft", "mtp"
"""The kind of a draft model, and the name of the layers with which a model drafts for itself."""
TOKENS = 8192
"""The number of tokens in the KV caches for which a pair must have enough memory."""
BITS = (4, 8, 16)
SYSTEM_BYTES = 4 * 10**9
SYSTEM_SHARE = 0.35
"""The memory of a Mac that `--model auto` leaves to macOS and other programs: at least this many
bytes, and at least this share. Macs whose models took more have frozen."""
CPU_SHARE = 0.25
"""The share of the room that `--model auto` may take on a CPU, on which large models are slow."""
TYPICAL_CHIP = "M4 Pro"
"""The chip that is assumed if none is known. Most of the table was measured on it."""
SLOW_CHIPS = ("M1", "M2")
"""The beginnings of the names of chips whose GPU (of a generation below 15) reads quantized weights
again for every row of a pass."""
_MAC = re.compile(r"(?:apple )?(m\d+(?: (?:pro|max|ultra))?)?[ ,]*(.*)", re.IGNORECASE)
"""Matches a chip, which may be missing, and a size."""
_CONVERTED = re.compile(r"(-mlx)?(-([2-8])bit|-bf16|-fp16|-mxfp[48]|-nvfp4|-dwq|-mlx|-q[48])*$")
"""Matches the endings that conversions, such as mlx-community's, append to a model's name."""


@dataclass(frozen=True)
class Machine:
    """The facts about a machine that decide which pairs fit.

    Attributes:
        name: The name of its accelerator, or "cpu".
        room: The bytes that models and caches may take. Passes need the rest.
        auto_room: The bytes that a pair for `--model auto` may take, which are at most `room`.
        on_cpu: Whether it computes on the CPU.
        speed: The memory bandwidth divided by the bandwidth of TYPICAL_CHIP.
        slow_rows: Whether its GPU reads quantized weights again for every row of a pass."""

    name: str
    room: int
    auto_room: int
    on_cpu: bool
    speed: float
    slow_rows: bool


def this_machine() -> Machine:
    """Return the machine that runs this program."""
    import mlx.core as mx

    from ..models.number_format import on_cpu

    memory = system.memory() if mx.metal.is_available() and not on_cpu() else math.inf
    return _machine(system.device_name(), system.usable_memory(), memory, on_cpu())


def mac(described: str) -> Machine:
    """Return a Mac with a chip and a memory, such as "M4 Pro 48GB", or with a memory alone, such as
    32GB. Like Apple, this function counts 1 GB as 2^30 bytes. Raises OptionError if there is no
    size."""
    chip, size = _MAC.fullmatch(described.strip()).groups()  # type: ignore[union-attr]
    memory = parse_size("--memory", size, kilo=1024)
    share = 2 / 3 if memory <= 36 << 30 else 3 / 4  # what Metal recommends for the GPU
    name = f"{chip.title() if chip else 'a Mac'} with {memory / (1 << 30):g} GB"
    return _machine(name, share * memory, memory, False)


def _machine(name: str, usable: float, memory: float, on_cpu: bool) -> Machine:
    """Return a machine, whose name contains its chip. usable, memory: The bytes that models may
    use, and all that macOS shares with them."""
    from .memory import RESERVE

    room = (1 - RESERVE) * usable
    left = min(memory - SYSTEM_BYTES, (1 - SYSTEM_SHARE) * memory)
    auto_room = min(room * (CPU_SHARE if on_cpu else 1), max(0, left))
    chips = _table()["chips"]
    chip = max((chip for chip in chips if chip in name), key=len, default=TYPICAL_CHIP)
    speed, slow_rows = chips[chip] / chips[TYPICAL_CHIP], chip.startswith(SLOW_CHIPS)
    return Machine(name, int(room), int(auto_room), on_cpu, speed, slow_rows)


@dataclass(frozen=True)
class KnownModel:
    """A model of the table.

    Attributes:
        billions: Billions of weights, as stated by the publisher.
        kib: KiB of the 16-bit KV cache per token: 4 x layers x KV heads x head width / 1024. If
            layers have a window, this is the mean over 8k tokens.
        type: The model_type in config.json, or "" for a drafter.
        active: Billions of weights that a token uses, if it is a mixture of experts.
        conversions: Repositories of conversions to MLX's format, by bits as a string.
        bits: The numbers of bits at which it is available. BITS stands for any number.
        quality: The quality class of a target, "A" to "E". Dense models are in class A from 20
            billion weights on, in B from 8, in C from 3 and in D from 2. A mixture of experts
            counts as the geometric mean of all and active weights. Models before 2026 are one
            class lower."""

    name: str
    billions: float
    kib: float
    type: str = ""
    active: float | None = None
    conversions: Mapping[str, str] = field(default_factory=dict)
    bits: Sequence[int] = BITS
    quality: str = "E"

    def nbytes(self, bits: int, on_cpu: bool) -> int:
        """Return the bytes that weights and KV cache need. bits: Bits per weight."""
        from ..models.number_format import NumberFormat

        count, width = int(1e9 * self.billions), 4 if on_cpu else 2
        if bits == max(BITS) or (on_cpu and NumberFormat(q_bits=bits).expands(count)):
            weights = count * width
        else:
            weights = count * bits // 8 + count // 64 * 2 * width  # a scale and a bias for 64
        return weights + int(TOKENS * self.kib * 512 * width)

    def source(self, bits: int) -> tuple[str, int | None]:
        """Return the name to load, and the bits for quantization on load, or None."""
        quantizes = str(bits) not in self.conversions and bits != max(BITS)
        return self.conversions.get(str(bits), self.name), bits if quantizes else None

    def download(self, bits: int) -> int:
        """Estimate the bytes of the files that `source` names on the Hub."""
        stored = bits + 0.5 if str(bits) in self.conversions else max(BITS)
        return int(1e9 * self.billions * stored / 8)


@dataclass(frozen=True)
class KnownPair:
    """A target and its draft: a draft model with the same tokenizer, a hidden-state drafter, or the
    target's own MTP layers.

    Attributes:
        kind: DRAFT, or one of `models.drafters.DRAFTER_KINDS`.
        run: Whether this program was tested with the pair.
        uses: The uses for which `--model auto` may choose it.
        gains: Published speeds relative to plain decoding, by bits as a string and use.
        source: The publisher of these figures (`by`), the place (`where`), the date in ISO 8601,
            the machine and its chip; None without figures.
        plain: Published tokens per second of plain decoding on that machine, by bits.
        tokens: Published tokens per round. If nobody has published them, the table has 2.5 for a
            draft model (3 draft tokens, each accepted with a probability of 0.7) and 1.8 for MTP
            layers (one, accepted with 0.8). None for encoder-decoders, whose costs do not follow
            from their weights, and for other drafters.
        speeds: Tokens per second on TYPICAL_CHIP, by bits and use, and of plain decoding (`plain`).
            benchmarks/fill_pairs.py computes them from the figures above.
        contrary: Published results that contradict the gains, or ""."""

    target: KnownModel
    draft: KnownModel
    kind: str
    run: bool = False
    uses: Sequence[str] = ()
    gains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    source: Mapping[str, str] | None = None
    plain: Mapping[str, float] = field(default_factory=dict)
    tokens: float | None = None
    speeds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    contrary: str = ""

    def draft_bits(self, bits: int) -> int:
        """Return the bits of the draft if the target has `bits` bits. Drafters keep their 16."""
        return bits if self.kind == DRAFT else max(BITS)

    def nbytes(self, bits: int, on_cpu: bool) -> int:
        """Return the bytes of target and draft, and of their caches."""
        draft = self.draft.nbytes(self.draft_bits(bits), on_cpu)
        return self.target.nbytes(bits, on_cpu) + draft

    def gain(self, bits: int, use: str) -> float | None:
        """Return the published gain at exactly these bits, or None if nobody has published it."""
        return self.gains.get(str(bits), {}).get(use)

    def speed(self, bits: int, use: str) -> float:
        """Return tokens per second on TYPICAL_CHIP, or 0 if the gain is unknown. use: One of USES,
        or "plain" for the speed without drafts."""
        stored = next((n for n in BITS if n >= bits), max(BITS))
        return self.speeds.get(str(stored), {}).get(use, 0.0)

    def pays(self, bits: int, use: str, machine: Machine) -> bool:
        """Return whether the pair fits into `machine.auto_room` and gains there. With slow rows,
        only a gain at 16 bits counts, or one that was measured on such a machine."""
        chip = (self.source or {}).get("chip", "")
        measured = str(bits) in self.gains and chip.startswith(SLOW_CHIPS)
        return (
            (self.target.bits == BITS or bits in self.target.bits)
            and (not machine.slow_rows or bits == max(BITS) or measured)
            and self.speed(bits, use) > self.speed(bits, "plain")
            and self.nbytes(bits, machine.on_cpu) <= machine.auto_room
        )

    def draft_source(self, bits: int) -> tuple[str, int | None]:
        """Return the draft's name to load, and the bits for its quantization on load, or None."""
        name, q_bits = self.draft.source(self.draft_bits(bits))
        return self.draft_name(self.target.source(bits)[0]) if self.kind == MTP else name, q_bits

    def draft_name(self, target: str) -> str:
        """Return the name of the unquantized draft for a target. Conversions lack MTP layers, which
        then come from the original."""
        converted = self.kind == MTP and target != self.target.name
        return f"{MTP}:{self.target.name}" if converted else self.draft.name


def best(
    pairs: Sequence[KnownPair],
    use: str,
    machine: Machine,
    bits: Sequence[int] = BITS,
    any_class: bool = False,
) -> tuple[KnownPair, int] | None:
    """Return the fastest pair that pays, and its bits per weight, or None if there is no pair. Of
    pairs that reach ENOUGH, only the highest quality class counts, unless `any_class` is true.
    Among equal speeds, published gains win, and then more bits."""
    paying = ((one, n) for one in pairs for n in bits if one.pays(n, use, machine))
    found = [(machine.speed * one.speed(n, use), one, n) for one, n in paying]
    enough = [] if any_class else [choice for choice in found if choice[0] >= ENOUGH]
    highest = min((one.target.quality for _, one, _ in enough), default="")
    found = [choice for choice in enough if choice[1].target.quality == highest] or found
    fastest = max((speed for speed, _, _ in found), default=0)
    near = [choice for choice in found if choice[0] >= SAME * fastest]
    near.sort(key=lambda choice: (choice[1].gain(choice[2], use) is not None, choice[2], choice[0]))
    return near[-1][1:] if near else None


def best_for(use: str, machine: Machine, q_bits: int | None = None) -> tuple[KnownPair, int]:
    """Return the pair that `--model auto` means on a machine, and the bits per weight. Raises
    OptionError if no pair fits, or if `use` is unknown.

    Args:
        use: One of USES, or FAST.
        q_bits: The bits that the user has chosen."""
    if use not in (*USES, FAST):
        raise OptionError(f"give auto, auto:code or auto:fast, not auto:{use}")
    purpose = USES[0] if use == FAST else use
    pairs = [one for one in known_pairs() if purpose in one.uses]
    bits = BITS if q_bits is None else (q_bits,)
    if found := best(pairs, purpose, machine, bits, any_class=use == FAST):
        return found
    if machine.slow_rows and q_bits is not None:
        raise OptionError(f"an M1 or M2 gains nothing at {q_bits} bits: leave out --q-bits")
    least = min(one.nbytes(bits[0], machine.on_cpu) for one in pairs)
    raise OptionError(
        f"no pair for {use} fits: the smallest takes {show_size(least)} with {TOKENS:,} tokens, "
        f"and {show_size(machine.auto_room)} are there; name a smaller model with --model"
    )


def draft_for(target: str) -> str:
    """Return the table's fastest draft for a target, or the smallest one if no gain is known. The
    target may be a conversion of a model in the table. Raises OptionError if the table has no draft
    for it."""
    base, bits = _base(target)
    found = [one for one in known_pairs() if _base(one.target.name)[0] == base]
    if not found:
        raise OptionError(
            f"the table of pairs has no draft for {target}: name a smaller model with the target's "
            "own tokenizer, or --proposer ngram, which needs no draft"
        )
    pair = max(found, key=lambda one: (one.speed(bits, USES[0]), -one.draft.billions))
    return pair.draft_name(target)


def known_pair(target: str, draft: str) -> KnownPair | None:
    """Return the pair of the table with this target and draft, or conversions of them, or None."""
    names = [_base(target)[0], _base(draft)[0]]
    same = (p for p in known_pairs() if names == [_base(m.name)[0] for m in (p.target, p.draft)])
    return next(same, None)


def _base(name: str) -> tuple[str, int]:
    """Return the name of a model without its owner and the endings of conversions, and the number
    of bits that the endings state, as one of BITS."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    found = _CONVERTED.search(last)
    stated = int(found[3]) if found and found[3] else max(BITS)
    nearest = min(BITS, key=lambda bits: abs(bits - stated))
    return _CONVERTED.sub("", last).removeprefix("meta-"), nearest


def known_pairs() -> list[KnownPair]:
    """Return the pairs of the table."""
    table = _table()
    models = {key: KnownModel(**{"name": key, **entry}) for key, entry in table["models"].items()}
    for entry in table["pairs"]:
        entry["target"], entry["draft"] = models[entry["target"]], models[entry["draft"]]
        entry["source"] = table["sources"].get(entry.get("source"))
    return [KnownPair(**entry) for entry in table["pairs"]]


def _table() -> Any:
    """Return the content of pairs.json."""
    return json.loads((Path(__file__).parents[1] / "pairs.json").read_text(encoding="utf-8"))
