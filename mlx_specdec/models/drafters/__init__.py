"""Hidden-state drafters: networks that draft from a target's hidden states, one module per family.
The modules import mlx-lm in functions only, because T5 targets also import the drafters and must
not import mlx-lm. This module imports no MLX, so that the command line can list the kinds quickly.
"""

from collections.abc import Mapping

DRAFTER_KINDS: Mapping[str, str] = {
    "dspark": "dflash:DSpark",
    "dflash2": "dflash:DFlash2",
    "dflash": "dflash:DFlash",
    "peagle": "eagle:PEagle",
    "eagle3": "eagle:Eagle3",
    "mtp": "mtp:Mtp",
    "eagle": "eagle:Eagle",
    "gemma4_assistant": "gemma4_assistant:Assistant",
}
"""The module and the name of each kind's network. Directories are recognized in this
order: the files of a DSpark also look like a DFlash, and the files of a P-EAGLE like an EAGLE-3."""
