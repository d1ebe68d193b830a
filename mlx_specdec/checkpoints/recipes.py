"""What is to be written for a source: its tensors under final names, and what becomes of each.

One recipe per kind of source. A recipe for another kind (GGUF, Meta's shards) gives the same
object; whatever comes after it, writing and checking, stays as it is. Knows names and types. Knows
nothing of where the result goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, OptionError
from . import files, keys
from .account import Account, take_stock
from .formats.safetensors import DTYPES
from .keys import Quantisation
from .t5_purpose import check_generates
from .tensors import Tensor, same


@dataclass(frozen=True)
class Recipe:
    """A conversion that has been thought through and not begun.

    config: config.json of the result, a quantization entry of the source's own included.
    tensors: starts over at each call and gives (name, tensor) as the source holds them, not read
        yet. Its argument is a directory that need not be there: what a recipe has to lay down on
        the way goes into it, at most scratch_nbytes, and whoever made the call removes it.
    outlines: name -> a lazy array of the type and shape, which holds nothing.
    quantised: name -> how it is packed, for what is packed.
    natural: name -> the type that it is written in where none is asked for, if not its own.
    keeps_dtype: whether a tensor stays in its type whatever is asked for.
    account: what becomes of each of the source's tensors. paths: the source's files of weights, of
    this format. notes: sentences for the user.
    """

    config: Mapping[str, Any]
    tensors: Callable[[Path], Iterator[tuple[str, Tensor]]]
    outlines: Mapping[str, mx.array]
    account: Account
    format: str
    paths: tuple[Path, ...]
    scratch_nbytes: int = 0
    quantised: Mapping[str, Quantisation] = field(default_factory=dict)
    natural: Mapping[str, mx.Dtype] = field(default_factory=dict)
    keeps_dtype: Callable[[str], bool] = lambda name: False
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all tensors, as the source holds them."""
        return sum(outline.nbytes for outline in self.outlines.values())


def recipe_for(directory: Path, quantisation: Quantisation | None, mixed: str = "") -> Recipe:
    """The recipe of a directory with config.json and weights in any format that is read here.

    quantisation: of what may be quantised, None to leave all as it is. mixed: a recipe of several
    widths, a key of `keys.MIXED`, of which quantisation has the smaller.

    Raises CheckpointError for sources that are damaged, incomplete or not supported, OptionError
    where they cannot be quantised so.
    """
    config = files.read_config(directory)
    if quantisation is not None and (config.get("quantization") is not None):
        raise OptionError(f"{directory} is quantised already: leave --quantize out")
    if keys.is_encoder_decoder(config):
        return _t5(directory, config, quantisation, mixed)
    from .decoder_only import decoder_only_recipe

    return decoder_only_recipe(directory, config, quantisation, mixed)


def _t5(
    directory: Path, config: Mapping[str, Any], quantisation: Quantisation | None, mixed: str
) -> Recipe:
    weights = files.Weights(directory)
    check_generates(directory, config, weights.infos)
    places = keys.names(config, weights.infos)
    own_head = _own_head(weights, places)
    if not own_head:
        for part in ("weight", *keys.PACKED):
            places.pop(f"lm_head.{part}", None)
    shapes = keys.t5_shapes(config, own_head=own_head)
    _check_t5(directory, config, weights, places, shapes)
    quantised = _t5_quantised(config, shapes, quantisation, mixed)
    written = {
        **config,
        "tie_word_embeddings": not own_head,
        "scale_decoder_outputs": keys.scales_output(config),
    }
    left = sorted(weights.infos.keys() - places.values())
    account = _account(weights, places, left)

    def tensors(scratch: Path) -> Iterator[tuple[str, Tensor]]:
        for name, place in places.items():
            yield name, weights.tensor(place)

    return Recipe(
        config=written,
        tensors=tensors,
        outlines={name: weights.tensor(place).outline for name, place in places.items()},
        account=account,
        format=weights.format,
        paths=weights.paths,
        quantised=quantised,
        notes=(*weights.notes, *_t5_notes(quantisation, quantised)),
    )


def _own_head(weights: files.Weights, places: Mapping[str, str]) -> bool:
    """Whether the output head is there and differs from `shared`."""
    if keys.HEAD not in places:
        return False
    for part in ("weight", *keys.PACKED):
        pair = [places.get(f"{path}.{part}") for path in ("lm_head", "shared")]
        if pair == [None, None]:
            continue
        if pair[0] is None or pair[1] is None:
            return True
        head, shared = (weights.tensor(place) for place in pair if place is not None)
        if not same(head, shared):
            return True
    return False


def _check_t5(
    directory: Path,
    config: Mapping[str, Any],
    weights: files.Weights,
    places: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    packed = keys.quantization(config) is not None
    paths = {name.removesuffix(".scales") for name in places if name.endswith(".scales")}
    for name in shapes:
        if name not in places:
            raise CheckpointError(f"{directory} lacks the tensor {name}")
    for name, place in places.items():
        path, _, _ = name.rpartition(".")
        if packed and path in paths and f"{path}.weight" in shapes:
            continue
        if name not in shapes:
            raise CheckpointError(f"{directory} holds {place}, which config.json does not ask for")
        info = weights.infos[place]
        if info.shape != shapes[name]:
            raise CheckpointError(
                f"{directory}: {place} has shape {info.shape} where config.json asks for "
                f"{shapes[name]}"
            )
        if not mx.issubdtype(DTYPES[info.dtype], mx.floating):
            raise CheckpointError(f"{directory}: {place} holds {info.dtype} instead of weights")


def _t5_quantised(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    quantisation: Quantisation | None,
    mixed: str,
) -> dict[str, Quantisation]:
    if quantisation is None:
        return {}
    found = {
        name: how
        for name, shape in shapes.items()
        if (how := keys.quantisation_of(config, name, shape, quantisation, mixed)) is not None
    }
    if not found:
        raise OptionError(
            f"no matrix's rows divide into groups of {quantisation.group_size}: give a smaller "
            "--q-group-size"
        )
    return found


def _account(weights: files.Weights, places: Mapping[str, str], left: list[str]) -> Account:
    """What was left out, and why: copies of the embedding, tables that only look like copies, and
    positions that nothing reads."""
    shared = places[keys.SHARED]
    tied, dropped = {}, {}
    for name in left:
        # A head that is left out has been found to be a copy.
        if name in keys.TWINS and not same(weights.tensor(name), weights.tensor(shared)):
            dropped[name] = f"no copy, but T5 reads the words of both its halves from {shared}"
        elif name in keys.TWINS or name.startswith("lm_head."):
            tied[name] = shared
        else:
            dropped[name] = keys.UNUSED
    return take_stock(weights.contents, places, tied=tied, dropped=dropped)


def _t5_notes(
    quantisation: Quantisation | None,
    quantised: Mapping[str, Quantisation],
) -> tuple[str, ...]:
    notes = []
    if quantisation is not None:
        wider: dict[int, list[str]] = {}
        for name, how in quantised.items():
            if how.bits > quantisation.bits:
                wider.setdefault(how.bits, []).append(name)
        for bits, names in wider.items():
            notes.append(f"packed to {bits} bits, they suffer most: {', '.join(names)}")
        notes.append("not packed: norms and relative attention biases")
    return tuple(notes)
