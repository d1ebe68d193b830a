"""The table of matching pairs in pairs.json, their gains, and the choice of a pair to run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
WIRED_SHARES = ((36 << 30, 2 / 3), (math.inf, 3 / 4))
"""Metal recommends this share of a Mac's memory for the GPU. Each entry has the largest memory to
which its share applies, in bytes."""
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
USUAL_TOKENS = {DRAFT: 2.5, MTP: 1.8}
"""Tokens per round if no figure is published. A draft model drafts DRAFTED tokens, and each is
accepted with a probability of 0.7. MTP layers draft one, which is accepted with 0.8."""
DRAFTED = 3
HOW_TO_CHOOSE = (
    "name a smaller model with the target's own tokenizer that takes less than a fifth of the "
    "target's time, or self, or --proposer ngram, which needs no draft"
)
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

    from ..engine.memory import RESERVE
    from ..models.number_format import on_cpu

    nbytes = (1 - RESERVE) * system.usable_memory()
    auto = nbytes * CPU_SHARE if on_cpu() else nbytes
    if mx.metal.is_available() and not on_cpu():
        auto = min(auto, _beside_system(system.memory()))
    return Machine(system.device_name(), max(0, int(nbytes)), max(0, int(auto)), on_cpu())


def mac(size: str) -> Machine:
    """Return a Mac with the memory that `size` states, such as 32GB. Like Apple, this function
    counts 1 GB as 2^30 bytes. Raises OptionError if `size` is no size."""
    from ..engine.memory import RESERVE

    memory = parse_size("--memory", size, kilo=1024)
    share = next(share for most, share in WIRED_SHARES if memory <= most)
    nbytes = (1 - RESERVE) * share * memory
    auto = max(0, min(nbytes, _beside_system(memory)))
    return Machine(f"a Mac with {memory / (1 << 30):g} GB", int(nbytes), int(auto), False)


def _beside_system(memory: int) -> float:
    return memory - max(SYSTEM_BYTES, SYSTEM_SHARE * memory)


@dataclass(frozen=True)
class KnownModel:
    """A model of the table.

    Attributes:
        billions: Billions of weights, as stated by the publisher.
        kib: KiB of the 16-bit KV cache per token: 4 x layers x KV heads x head width / 1024. If
            layers have a window, this is the mean over 8k tokens.
        type: The model_type in config.json, or "" for a drafter.
        active: Billions of weights that a token uses, if it is a mixture of experts.
        conversions: Repositories of conversions to MLX's format, by bits.
        bits: The numbers of bits at which it is available. BITS stands for any number.
        unconfirmed: Whether `--model auto` leaves it out, because its size is not confirmed."""

    name: str
    billions: float
    kib: float
    type: str = ""
    active: float | None = None
    conversions: Mapping[int, str] = field(default_factory=dict)
    bits: Sequence[int] = BITS
    unconfirmed: bool = False

    @property
    def size(self) -> float:
        """The billions of weights of a dense model with about the same abilities. For a mixture of
        experts, this is the geometric mean of all weights and the active weights."""
        return math.sqrt(self.billions * (self.active or self.billions))

    def nbytes(self, bits: int, on_cpu: bool) -> int:
        """Return the bytes that weights and KV cache need. bits: Bits per weight."""
        from ..models.number_format import NumberFormat

        count, width = int(1e9 * self.billions), 4 if on_cpu else 2
        weights = count * bits // 8 + count // 64 * 2 * width  # a scale and a bias for 64 weights
        if bits == max(BITS) or (on_cpu and NumberFormat(q_bits=bits).expands(count)):
            weights = count * width
        return weights + int(TOKENS * self.kib * 512 * width)

    def source(self, bits: int) -> tuple[str, int | None]:
        """Return the name to load, and the bits for quantization on load, or None."""
        if bits in self.conversions:
            return self.conversions[bits], None
        return self.name, None if bits == max(BITS) else bits

    def download(self, bits: int) -> int:
        """Estimate the bytes of the files that `source` names on the Hub."""
        stored = bits + 0.5 if bits in self.conversions else max(BITS)
        return int(1e9 * self.billions * stored / 8)


@dataclass(frozen=True)
class Publication:
    """The publisher of figures, the place, the date in ISO 8601, and the machine that was used."""

    by: str
    where: str
    date: str
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.by} on {self.machine}" if self.machine else self.by


@dataclass(frozen=True)
class KnownPair:
    """A target and its draft: a draft model with the same tokenizer, a hidden-state drafter, or the
    target's own MTP layers.

    Attributes:
        kind: DRAFT, or one of `models.drafters.DRAFTER_KINDS`.
        run: Whether this program was tested with the pair.
        uses: The uses for which `--model auto` may choose it.
        gains: Published speeds relative to plain decoding, by bits and use.
        tokens: Tokens per round that were published, or None.
        source: The source of these figures, or None without any."""

    target: KnownModel
    draft: KnownModel
    kind: str
    run: bool
    uses: tuple[str, ...]
    gains: Mapping[int, Mapping[str, float]]
    tokens: float | None
    source: Publication | None

    def draft_bits(self, bits: int) -> int:
        """Return the bits of the draft if the target has `bits` bits. Drafters keep their 16."""
        return bits if self.kind == DRAFT else max(BITS)

    def nbytes(self, bits: int, on_cpu: bool) -> int:
        """Return the bytes of target and draft, and of their caches."""
        draft = self.draft.nbytes(self.draft_bits(bits), on_cpu)
        return self.target.nbytes(bits, on_cpu) + draft

    def published_gain(self, bits: int, use: str) -> float | None:
        """Return the published gain, or None if nobody has published it."""
        return self.gains.get(bits, {}).get(use)

    def gain(self, bits: int, use: str) -> float | None:
        """Return the published or the estimated gain, or None if there are no figures to estimate
        from. The costs of encoder-decoders do not follow from their weights."""
        from ..models.families import is_encoder_decoder

        if (published := self.published_gain(bits, use)) is not None:
            return published
        for other, gains in self.gains.items():
            if use in gains:
                return gains[use] * self._cost(other) / self._cost(bits)
        tokens = self.tokens or USUAL_TOKENS.get(self.kind)
        if tokens is None or is_encoder_decoder({"model_type": self.target.type}):
            return None
        return tokens / self._cost(bits)

    def _cost(self, bits: int) -> float:
        """Return the typical duration of a round in plain steps."""
        experts = self.target.active is not None
        if self.kind in SHORT:
            return SHORT_COSTS[experts]
        cost = EXPERTS_COST if experts else ROUND_COSTS[_nearest(bits)]
        if self.kind == DRAFT:
            cost += DRAFTED * self.draft.billions / (self.target.active or self.target.billions)
        return cost

    def line(self, bits: int, command: str = "chat") -> str:
        """Return the command line that names the pair."""
        words = [f"mlx-specdec {command}"]
        sources = {"": self.target.source(bits), "draft-": self.draft_source(bits)}
        for which, (name, q_bits) in sources.items():
            words.append(f"--{which}model {name}")
            words += [f"--{which}q-bits {q_bits}"] if q_bits else []
        return " ".join(words)

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
    pairs: Sequence[KnownPair], bits: Collection[int], nbytes: int, use: str, on_cpu: bool
) -> tuple[KnownPair, int] | None:
    """Return the pair with the largest gain that fits into `nbytes`, and its bits per weight, or
    None if no pair with a gain fits. Only targets of at least COMPETING times the size of the
    largest fitting one compete. If gains are equal, a published gain and a larger model win."""
    fitting = [
        (one, n)
        for one in pairs
        for n in bits
        if not one.target.unconfirmed
        and (one.target.bits == BITS or n in one.target.bits)
        and one.gain(n, use) is not None
        and one.nbytes(n, on_cpu) <= nbytes
    ]
    least = COMPETING * max((one.target.size for one, _ in fitting), default=0)

    def rank(choice: tuple[KnownPair, int]) -> tuple[float, bool, float, int]:
        one, n = choice
        return one.gain(n, use) or 0, one.published_gain(n, use) is not None, one.target.size, n

    return max((one for one in fitting if one[0].target.size >= least), key=rank, default=None)


def best_for(
    use: str, q_bits: int | None = None, machine: Machine | None = None
) -> tuple[KnownPair, int]:
    """Return the pair for `--model auto`, and the bits per weight.

    Raises OptionError if no pair fits, or if `use` is unknown.

    Args:
        q_bits: The bits that the user has chosen, or None.
        machine: The machine that has to run it, or None for this one."""
    if use not in USES:
        raise OptionError(f"--model auto is for chat or code: give auto or auto:code, not {use!r}")
    machine = machine or this_machine()
    pairs, nbytes = [one for one in known_pairs() if use in one.uses], machine.auto_room
    bits = BITS[:2] if q_bits is None else (q_bits,)
    if found := best(pairs, bits, nbytes, use, machine.on_cpu):
        return found
    least = min(one.nbytes(q_bits or BITS[0], machine.on_cpu) for one in pairs)
    raise OptionError(
        f"no pair for {use} fits: the smallest takes {show_size(least)} with {TOKENS:,} tokens, "
        f"and {show_size(nbytes)} are there; name a smaller model with --model"
    )


def draft_for(target: str) -> str:
    """Return the table's draft that gains most for a target, or the smallest one if no gain is
    known. The target may be a conversion of a model in the table. Raises OptionError if the table
    has no draft for it."""
    base, bits = _base(target)
    found = [one for one in known_pairs() if _base(one.target.name)[0] == base]
    if not found:
        raise OptionError(f"the table of pairs has no draft for {target}: {HOW_TO_CHOOSE}")

    def by_gain(pair: KnownPair) -> tuple[float, float]:
        return pair.gain(bits, USES[0]) or 0, -pair.draft.billions

    return max(found, key=by_gain).draft_name(target)


def known_pair(target: str, draft: str) -> KnownPair | None:
    """Return the pair of the table with this target and draft, or conversions of them, or None."""
    names = _base(target)[0], _base(draft)[0]
    pairs = known_pairs()
    same = (one for one in pairs if names == (_base(one.target.name)[0], _base(one.draft.name)[0]))
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
    sources = {key: Publication(**entry) for key, entry in table["sources"].items()}
    return [
        pair
        for group in table["groups"]
        for name, entry in group["targets"].items()
        for pair in _pairs_of(group, name, entry, sources)
    ]


def _pairs_of(
    group: Mapping[str, Any],
    name: str,
    entry: Mapping[str, Any],
    sources: Mapping[str, Publication],
) -> Iterator[KnownPair]:
    target = _model(name, group, entry)
    use = group.get("use", "")
    uses = USES if use == "any" else tuple(one for one in USES if one == use)

    def pair(draft: KnownModel, kind: str, figures: Mapping[str, Any]) -> KnownPair:
        gains = {
            int(bits): gain if isinstance(gain, dict) else dict.fromkeys(USES, gain)
            for bits, gain in figures.get("gains", {}).items()
        }
        source = sources[figures["source"]] if "source" in figures else None
        run, tokens = group.get("run", False), figures.get("tokens")
        return KnownPair(target, draft, kind, run, uses, gains, tokens, source)

    if "draft" in group:
        yield pair(_model(group["draft"], group, group), DRAFT, entry)
    for kind, listed in entry.get("drafters", {}).items():
        figures: Mapping[str, Any] = {"name": listed} if isinstance(listed, str) else listed
        drafter = KnownModel(figures["name"], figures.get("billions", 0.0), figures.get("kib", 0.0))
        yield pair(drafter, kind, figures)


def _model(name: str, group: Mapping[str, Any], entry: Mapping[str, Any]) -> KnownModel:
    conversions = entry.get("converted", group.get("converted", {}))
    if conversions is True:
        last = name.rpartition("/")[2]
        conversions = {bits: f"mlx-community/{last}-{bits}bit" for bits in BITS[:2]}
    return KnownModel(
        name,
        entry["billions"],
        entry["kib"],
        entry.get("type", group["type"]),
        entry.get("active"),
        {int(bits): repository for bits, repository in conversions.items()},
        tuple(entry.get("bits", BITS)),
        entry.get("unconfirmed", False),
    )
