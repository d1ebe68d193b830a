"""The table of matching pairs in pairs.json, their gains, and the choice of a pair to run.

Importing this module does not import MLX."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import system
from ..errors import OptionError
from ..system import parse_size, show_size

AUTO = "auto"
"""As a draft model, this name means the table's best draft for the target. As a target, it means
the best pair that fits."""
USES = ("chat", "code")
"""The uses for which `--model auto` chooses a pair. The first one is the default."""
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
COMPETING = 0.5
"""Models of less than this share of the largest fitting model's size are not chosen, however much
drafts gain, because users want a capable model."""
ROUND_COSTS = {4: 1.9, 8: 1.5, 16: 1.5}
"""Typical duration of a round with 7 draft tokens, in plain steps of a dense model, by bits. Each
value is the median of tokens per round divided by gain in measurements of mlx-dspark (M4 Pro)."""
EXPERTS_COST = 3.3
"""The same duration for a mixture of experts, in which each row of a pass reads other experts."""
SHORT_COSTS = (1.2, 1.5)
"""The same durations for a round with one or two draft tokens. The first is for a dense model, and
the second is for a mixture of experts."""
SHORT = frozenset((MTP, "eagle", "eagle3", "gemma4_assistant"))
"""The kinds of drafters that draft one or two tokens on Macs."""
DRAFTED = 3
"""The number of tokens that a draft model drafts in a round, each of which takes time."""
_TABLE = Path(__file__).resolve().parents[1] / "pairs.json"
_CONVERTED = re.compile(r"(-mlx)?(-([2-8])bit|-bf16|-fp16|-mxfp[48]|-nvfp4|-dwq|-mlx|-q[48])*$")
"""Matches the endings that conversions, such as mlx-community's, append to a model's name."""


@dataclass(frozen=True)
class Machine:
    """The facts about a machine that decide which pairs fit.

    Attributes:
        name: The name of its accelerator, or "cpu".
        room: The bytes that models and caches may take. Passes need the rest.
        auto_room: The bytes that a pair for `--model auto` may take, which are at most `room`.
        on_cpu: Whether it computes on the CPU."""

    name: str
    room: int
    auto_room: int
    on_cpu: bool


def this_machine() -> Machine:
    """Return the machine that runs this program."""
    import mlx.core as mx

    from ..models.number_format import on_cpu

    memory = system.memory() if mx.metal.is_available() and not on_cpu() else math.inf
    return _machine(system.device_name(), system.usable_memory(), memory, on_cpu())


def mac(size: str) -> Machine:
    """Return a Mac with the memory that `size` states, such as 32GB. Like Apple, this function
    counts 1 GB as 2^30 bytes. Raises OptionError if `size` is no size."""
    memory = parse_size("--memory", size, kilo=1024)
    share = 2 / 3 if memory <= 36 << 30 else 3 / 4  # what Metal recommends for the GPU
    return _machine(f"a Mac with {memory / (1 << 30):g} GB", share * memory, memory, False)


def _machine(name: str, usable: float, memory: float, on_cpu: bool) -> Machine:
    """Return a machine. usable, memory: The bytes that models may use, and all that macOS shares
    with them."""
    from .memory import RESERVE

    room = (1 - RESERVE) * usable
    left = min(memory - SYSTEM_BYTES, (1 - SYSTEM_SHARE) * memory)
    auto_room = min(room * (CPU_SHARE if on_cpu else 1), max(0, left))
    return Machine(name, int(room), int(auto_room), on_cpu)


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
        bits: The numbers of bits at which it is available. BITS stands for any number."""

    name: str
    billions: float
    kib: float
    type: str = ""
    active: float | None = None
    conversions: Mapping[str, str] = field(default_factory=dict)
    bits: Sequence[int] = BITS

    @property
    def size(self) -> float:
        """The billions of weights of a dense model with about the same abilities. For a mixture of
        experts, this is the geometric mean of all weights and the active weights."""
        return math.sqrt(self.billions * (self.active or self.billions))

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
        tokens: Tokens per round. If nobody has published them, the table has 2.5 for a draft model
            (DRAFTED draft tokens, each accepted with a probability of 0.7) and 1.8 for MTP layers
            (one, accepted with 0.8). None for encoder-decoders, whose costs do not follow from
            their weights, and for other drafters.
        source: The publisher of these figures (`by`), the place (`where`), the date in ISO 8601
            and the machine; None without figures."""

    target: KnownModel
    draft: KnownModel
    kind: str
    run: bool = False
    uses: Sequence[str] = ()
    gains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tokens: float | None = None
    source: Mapping[str, str] | None = None

    def draft_bits(self, bits: int) -> int:
        """Return the bits of the draft if the target has `bits` bits. Drafters keep their 16."""
        return bits if self.kind == DRAFT else max(BITS)

    def nbytes(self, bits: int, on_cpu: bool) -> int:
        """Return the bytes of target and draft, and of their caches."""
        draft = self.draft.nbytes(self.draft_bits(bits), on_cpu)
        return self.target.nbytes(bits, on_cpu) + draft

    def published_gain(self, bits: int, use: str) -> float | None:
        """Return the published gain, or None if nobody has published it."""
        return self.gains.get(str(bits), {}).get(use)

    def gain(self, bits: int, use: str) -> float | None:
        """Return the published or the estimated gain, or None if there are no figures to estimate
        from."""
        from ..core.worth import values

        if (published := self.published_gain(bits, use)) is not None:
            return published
        timed = (gains[use] * self._cost(int(n)) for n, gains in self.gains.items() if use in gains)
        if (tokens := next(timed, self.tokens)) is None:
            return None
        return [*values([tokens - 1], [1.0, self._cost(bits)])][1]

    def rank(self, bits: int, use: str) -> tuple[float, bool, float, int]:
        """Return what decides between pairs that fit; the largest one wins. Figures are published
        with two digits."""
        published = self.published_gain(bits, use) is not None
        return round(self.gain(bits, use) or 0, 2), published, self.target.size, bits

    def _cost(self, bits: int) -> float:
        """Return the typical duration of a round in plain steps."""
        experts = self.target.active is not None
        if self.kind in SHORT:
            return SHORT_COSTS[experts]
        cost = EXPERTS_COST if experts else ROUND_COSTS[_nearest(bits)]
        if self.kind == DRAFT:
            cost += DRAFTED * self.draft.billions / (self.target.active or self.target.billions)
        return cost

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
    pairs: Sequence[KnownPair], use: str, machine: Machine, bits: Sequence[int] = BITS[:2]
) -> tuple[KnownPair, int] | None:
    """Return the pair with the largest gain that fits into `machine.auto_room`, and its bits per
    weight, or None if no pair with a gain fits. Only targets of at least COMPETING times the size
    of the largest fitting one compete. If gains are equal, a published gain and a larger model
    win."""
    fitting = [
        (one, n)
        for one in pairs
        for n in bits
        if (one.target.bits == BITS or n in one.target.bits)
        and one.gain(n, use) is not None
        and one.nbytes(n, machine.on_cpu) <= machine.auto_room
    ]
    least = COMPETING * max((one.target.size for one, _ in fitting), default=0)
    fitting = [choice for choice in fitting if choice[0].target.size >= least]
    return max(fitting, key=lambda choice: choice[0].rank(choice[1], use), default=None)


def best_for(use: str, machine: Machine, q_bits: int | None = None) -> tuple[KnownPair, int]:
    """Return the pair that `--model auto` means on a machine, and the bits per weight. Raises
    OptionError if no pair fits, or if `use` is unknown. q_bits: The bits that the user has chosen.
    """
    if use not in USES:
        raise OptionError(f"--model auto is for chat or code: give auto or auto:code, not {use!r}")
    pairs = [one for one in known_pairs() if use in one.uses]
    bits = BITS[:2] if q_bits is None else (q_bits,)
    if found := best(pairs, use, machine, bits):
        return found
    least = min(one.nbytes(bits[0], machine.on_cpu) for one in pairs)
    raise OptionError(
        f"no pair for {use} fits: the smallest takes {show_size(least)} with {TOKENS:,} tokens, "
        f"and {show_size(machine.auto_room)} are there; name a smaller model with --model"
    )


def draft_for(target: str) -> str:
    """Return the table's draft that gains most for a target, or the smallest one if no gain is
    known. The target may be a conversion of a model in the table. Raises OptionError if the table
    has no draft for it."""
    base, bits = _base(target)
    found = [one for one in known_pairs() if _base(one.target.name)[0] == base]
    if not found:
        raise OptionError(
            f"the table of pairs has no draft for {target}: name a smaller model with the target's "
            "own tokenizer, or --proposer ngram, which needs no draft"
        )
    pair = max(found, key=lambda one: (one.gain(bits, USES[0]) or 0, -one.draft.billions))
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
    return _CONVERTED.sub("", last).removeprefix("meta-"), _nearest(stated)


def _nearest(bits: int) -> int:
    return min(BITS, key=lambda one: abs(one - bits))


def known_pairs() -> list[KnownPair]:
    """Return the pairs of the table."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    models = {key: KnownModel(**{"name": key, **entry}) for key, entry in table["models"].items()}
    for entry in table["pairs"]:
        entry["target"], entry["draft"] = models[entry["target"]], models[entry["draft"]]
        entry["source"] = table["sources"].get(entry.get("source"))
    return [KnownPair(**entry) for entry in table["pairs"]]
