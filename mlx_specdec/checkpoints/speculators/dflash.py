"""DFlash 1, and DSpark, which is the same with a head that looks at the token before.

Source: z-lab/dflash (arXiv 2602.06036), deepseek-ai/DeepSpec (arXiv 2607.05147) and the files that
`speculators` and SpecForge write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .layout import SpeculatorFiles
from .settings import Settings, is_named, nested
from .sizes import LayerSizes, Shapes, described
from .stored import StoredTensors

ARCHITECTURES: Mapping[str, str] = {
    "dspark": r"\w*DSpark\w*",
    "dflash": r"\w*DFlash\w*",
}
IDS = "aux_hidden_state_layer_ids"
MoreShapes = Callable[[Settings, LayerSizes, int], Shapes]
USUAL_TAPS = 5
MOST_SLOTS = 256
MARKOV = ("vanilla", "gated", "rnn")
CONFIDENCE = "confidence_head.proj.weight"
CONFIDENCE_BIAS = "confidence_head.proj.bias"
W1 = "markov_head.markov_w1.weight"


@dataclass(frozen=True)
class BlockFiles(SpeculatorFiles):
    """slots: of one block, the newest token's included. skipped: how many of them say nothing.
    mask_token: what stands in a slot that is to be filled. windows: per layer how many positions it
    looks back, None without end. window_behind_block: that is counted from the block's first slot,
    and not from each. causal: per layer whether a slot sees those before it alone.
    markov: the kind of head that looks at the token before, or None.
    """

    sizes: LayerSizes
    slots: int
    skipped: int
    mask_token: int
    windows: tuple[int | None, ...]
    window_behind_block: bool
    causal: tuple[bool, ...]
    markov: str | None

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """From the second layer to the third from the end, evenly."""
        if self.taps == 1:
            return (layers // 2,)
        return tuple(round(1 + at * (layers - 4) / (self.taps - 1)) for at in range(self.taps))


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is a drafter of the kind, DSpark or DFlash 1."""
    telling = nested(config).get("markov_rank")
    if kind == "dflash":
        telling = isinstance(config.get("dflash_config"), Mapping)
    return bool(telling) or is_named(config, ARCHITECTURES[kind])


def read(
    kind: str, directory: Path, config: Mapping[str, Any], more: MoreShapes | None = None
) -> BlockFiles:
    """See `speculators.read`. more: tensors that a kind has beside those of DFlash 1."""
    settings, sizes, layered = described(directory, config, config.get("dflash_config"))
    if config.get("model_type") not in (None, "qwen3", "llama", "speculator_model") and not layered:
        raise settings.wrong("model_type", "qwen3")
    vocabulary = settings.whole("vocab_size", 151936 if layered else None)
    drafted = settings.whole("draft_vocab_size", vocabulary)
    stored = StoredTensors.of(directory, _own_name, _passed_over(drafted, vocabulary))
    stored.check_layers(sizes.count)
    taps = _taps(stored, settings.whole("target_hidden_size", sizes.width))
    markov = _markov(settings, stored)
    rank = stored.shapes[W1][-1] if markov is not None and stored.shapes[W1] else 0
    needed, optional = _shapes(sizes, taps, (vocabulary, drafted), markov, rank)
    needed |= _confidence(stored, sizes.width, rank)
    stored.check(needed | (more(settings, sizes, vocabulary) if more else {}), optional)
    anchored = settings.flag("sample_from_anchor", kind == "dspark")
    least = 1 if anchored else 2
    slots = settings.whole("block_size", 8 if layered else None, least, MOST_SLOTS)
    mask_token = settings.whole("mask_token_id", least=0)
    if mask_token >= vocabulary:
        raise settings.wrong("mask_token_id", f"one of the target's {vocabulary} tokens")
    windows = _windows(settings, sizes.count)
    return BlockFiles(
        directory=directory,
        kind=kind,
        sizes=sizes,
        tapped=_tapped(settings),
        taps=taps,
        target_width=sizes.width,
        vocabulary=vocabulary,
        target_ids=stored.target_ids(drafted, vocabulary),
        tensors=stored,
        slots=slots,
        skipped=0 if anchored else 1,
        mask_token=mask_token,
        windows=windows,
        window_behind_block=layered,
        causal=_causal(settings, windows, kind),
        markov=markov,
    )


def expected(
    kind: str, directory: Path, config: Mapping[str, Any], more: MoreShapes | None = None
) -> Shapes:
    """The tensors of such a drafter, as far as config.json tells. more: as in `read`."""
    settings, sizes, layered = described(directory, config, config.get("dflash_config"))
    vocabulary = settings.whole("vocab_size", 151936 if layered else None)
    vocabularies = vocabulary, settings.whole("draft_vocab_size", vocabulary)
    rank = settings.whole("markov_rank", 0, least=0)
    markov = _markov_kind(settings) if rank else None
    taps = len(_tapped(settings) or (0,) * USUAL_TAPS)
    needed, _ = _shapes(sizes, taps, vocabularies, markov, rank)
    return needed | (more(settings, sizes, vocabulary) if more else {})


def _own_name(name: str) -> str:
    # A codebook may be stored as a plain parameter.
    return re.sub(r"_codebook$", "_codebook.weight", name.removeprefix("model."))


def _tapped(settings: Settings) -> tuple[int, ...] | None:
    """The layers whose outputs are read. `speculators` names layers by their inputs, the others by
    their outputs."""
    if (by_input := settings.ids(IDS)) is not None:
        return tuple(layer - 1 for layer in by_input)
    return settings.ids("target_layer_ids")


def _taps(stored: StoredTensors, target_width: int) -> int:
    shape = stored.shapes.get("fc.weight", ())
    if len(shape) != 2:
        raise CheckpointError(f"{stored.directory} has no matrix fc.weight: it is not complete")
    return max(1, shape[1] // target_width)


def _passed_over(drafted: int, vocabulary: int) -> tuple[str, ...]:
    """What some files hold that is the target's own, since training freezes it."""
    own_head = () if drafted != vocabulary else ("lm_head.weight",)
    return ("embed_tokens.weight", *own_head)


def _markov(settings: Settings, stored: StoredTensors) -> str | None:
    """The kind of Markov head; None where there is none."""
    if W1 not in stored.shapes:
        if settings.whole("markov_rank", 0, least=0):
            raise CheckpointError(f"{stored.directory} lacks {W1}, which config.json asks for")
        return None
    return _markov_kind(settings)


def _markov_kind(settings: Settings) -> str:
    kind = settings.get("markov_head_type") or "vanilla"
    if kind not in MARKOV:
        raise settings.wrong("markov_head_type", " or ".join(MARKOV))
    return str(kind)


def _windows(settings: Settings, layers: int) -> tuple[int | None, ...]:
    kinds = settings.get("layer_types") or ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    listed = isinstance(kinds, list) and all(kind in known for kind in kinds)
    if not listed or len(kinds) != layers:
        raise settings.wrong("layer_types", "full_attention or sliding_attention for each layer")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = settings.whole("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(settings: Settings, windows: tuple[int | None, ...], kind: str) -> tuple[bool, ...]:
    """Where nothing says so, slots of layers with a window see those before them alone; those of
    DFlash 2 as `speculators` has it see all."""
    if settings.get("is_causal") is not None:
        return (settings.flag("is_causal", False),) * len(windows)
    seeing = kind == "dflash2" and settings.get("speculators_model_type") is not None
    sliding = not settings.flag("sliding_window_non_causal", seeing)
    return tuple(window is not None and sliding for window in windows)


def _shapes(
    sizes: LayerSizes, taps: int, vocabularies: tuple[int, int], markov: str | None, rank: int
) -> tuple[Shapes, Shapes]:
    """What there has to be, and what there may be."""
    width, (vocabulary, drafted) = sizes.width, vocabularies
    needed: Shapes = {
        "fc.weight": (width, taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        **sizes.before_layers(),
    }
    optional: Shapes = {"fc.bias": (width,)}
    own = {"d2t": (drafted,)}
    if drafted != vocabulary:
        needed |= {**own, "lm_head.weight": (drafted, width)}
    else:
        optional |= own
    for number in range(sizes.count):
        needed |= sizes.shapes(number, width)
        optional |= sizes.optional(number)
    if markov is not None:
        needed |= {W1: (vocabulary, rank), "markov_head.markov_w2.weight": (drafted, rank)}
    if markov == "gated":
        needed["markov_head.gate_proj.weight"] = (rank, width + rank)
        needed["markov_head.gate_proj.bias"] = (rank,)
    if markov == "rnn":
        needed["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
        needed["markov_head.joint_proj.bias"] = (3 * rank,)
    return needed, optional


def _confidence(stored: StoredTensors, width: int, rank: int) -> Shapes:
    """Of the confidence head, if there is one; it may look at the token before a slot as well."""
    if CONFIDENCE not in stored.shapes:
        return {}
    alone = stored.shapes[CONFIDENCE] == (1, width)
    needed: Shapes = {CONFIDENCE: (1, width if alone else width + rank)}
    return needed | ({CONFIDENCE_BIAS: (1,)} if CONFIDENCE_BIAS in stored.shapes else {})
