"""Hidden-state drafters: networks that draft from a target's hidden states, one module a family.
Imports no MLX: options name the kinds."""

from collections.abc import Mapping

KINDS: Mapping[str, str] = {
    "dspark": "dflash:DSPARK",
    "dflash2": "dflash2:DFLASH2",
    "dflash": "dflash:DFLASH",
    "peagle": "eagle:PEAGLE",
    "eagle3": "eagle:EAGLE3",
    "mtp": "mtp:MTP",
    "eagle": "eagle:EAGLE",
    "gemma4_assistant": "gemma4_assistant:ASSISTANT",
}
"""Name of a kind -> the module and the name of its `network.Kind`. Directories are recognized in
this order: a DSpark is a DFlash with more, and a P-EAGLE an EAGLE-3."""
