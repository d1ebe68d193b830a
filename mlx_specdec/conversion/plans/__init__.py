"""What a conversion will write, worked out before anything is read: one plan a kind of source."""

from __future__ import annotations

from pathlib import Path

from ...checkpoints import files
from ...checkpoints import t5_keys as keys
from ...checkpoints.disk import read_json
from ...checkpoints.quantization import Numbers
from ...errors import OptionError
from ...models.drafters import kinds as speculators
from .drafter import drafter_plan
from .plan import Plan as Plan
from .plan import dequantized
from .t5 import t5_plan


def plan_for(directory: Path, numbers: Numbers | None = None) -> Plan:
    """The plan of a directory with config.json and weights in any format that is read here. Raises
    CheckpointError, and OptionError where it cannot be quantized or dequantized as asked."""
    numbers = numbers or Numbers()
    drafter = speculators.read(directory)
    config = (
        files.read_config(directory) if drafter is None else read_json(directory / "config.json")
    )
    if numbers.quantization is not None and config.get("quantization") is not None:
        raise OptionError(f"{directory} is quantized already: leave --quantize out")
    if drafter is not None:
        plan = drafter_plan(directory, config, drafter, numbers)
    elif keys.is_encoder_decoder(config):
        plan = t5_plan(directory, config, numbers)
    else:
        from .decoder_only import decoder_only_plan

        plan = decoder_only_plan(directory, config, numbers)
    return dequantized(plan) if numbers.dequantize else plan
