"""Models that tiny Medusa heads fit."""

from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.base import Base
from mlx_specdec.models.drafters.medusa import MedusaHeads, stacked

from .medusa_files import tensors as tensors
from .medusa_files import write as write
from .pairs import SIZE, Numbers, model_for

base_of = model_for


def pair_of(base: Base, on: MedusaHeads) -> Pair:
    return Pair("target", None, base, None, Numbers(), frozenset(), SIZE, "float32", 0.0, heads=on)


def some_heads(base: Base, own_output: bool, count: int = 3) -> MedusaHeads:
    """Heads that are sometimes right: their output layers think that the text repeats itself."""
    found = tensors(count, 1, base.width, SIZE if own_output else None)
    return stacked(base, {name: 0.3 * array for name, array in found.items()}, count, 1)
