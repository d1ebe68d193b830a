"""Hidden-state drafters: networks that draft from a target's hidden states, one module per family.
The modules import mlx-lm in functions only, because T5 targets also import the drafters and must
not import mlx-lm. This module imports no MLX, so that the command line can list the kinds quickly.
"""

from collections.abc import Mapping

DRAFTER_KINDS: Mapping[str, str] = {
    "dspark": "dflash:DSPARK",
    "dflash2": "dflash:DFLASH2",
    "dflash": "dflash:DFLASH",
    "peagle": "eagle:PEAGLE",
    "eagle3": "eagle:EAGLE3",
    "mtp": "mtp:MTP",
    "eagle": "eagle:EAGLE",
    "gemma4_assistant": "gemma4_assistant:ASSISTANT",
}
"""The module and the name of each kind's `network.DrafterKind`. Directories are recognized in this
order: the files of a DSpark also look like a DFlash, and the files of a P-EAGLE like an EAGLE-3."""
