"""Write mlx_specdec/models/mlx_lm/settings.json: the keys of config.json that change a computation.

    python benchmarks/list_settings.py

For each type of tests/fixtures/configurations the file has the keys of transformers' configuration
class that match one of RULES, with their defaults. The default is the neutral value: the fixture of
the type proves that a network which does not read the key computes it. This program needs
transformers, and no torch."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

from make_configurations import OWN, TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

OUTPUT = Path(__file__).resolve().parents[1] / "mlx_specdec" / "models" / "mlx_lm" / "settings.json"
RULES = {
    "rotary": r"rope|rotary|position_embedding_type",
    "windows": r"window|sliding|attention_chunk",
    "scalings": r"scal(e|ing)|multiplier|multiple$|divisor|attn_temperature",
    "caps": r"cap(ping)?$|clip|limit$",
    "biases": r"bias$",
    "norms": r"qk_?(layer)?norm|post_norm|pre_norm|norm_before|rms_norm$|residual",
    "routing": r"norm_topk|scoring|topk_method|routed_scaling|router_bias|renormalize|gate_act",
    "activations": r"hidden_act|activation(_function)?$|act_fn|mamba_hidden_act",
}
TRAINING = re.compile(
    r"initializer|init_|loss|jitter|dropout|_pdrop|gradient|rescale_prenorm|fp32|_dim$"
)
"""Keys that only training reads, that choose a dtype, or that are sizes of tensors."""


def settings_of(kind: str) -> dict[str, Any]:
    """Return the keys of a type that match a rule, with their defaults."""
    known = CONFIG_MAPPING[kind]().to_dict()
    known = known["text_config"] if isinstance(known.get("text_config"), dict) else known
    known |= {name: value for name, value in OWN.get(kind, {}).items() if "window" not in name}
    rule = re.compile("|".join(RULES.values()))
    return {
        name: value
        for name, value in sorted(known.items())
        if rule.search(name) and not TRAINING.search(name) and name != "rope_parameters"
        if value is None or isinstance(value, (bool, int, float, str))
    }


def main() -> None:
    """Write the table."""
    warnings.filterwarnings("ignore")
    table = {kind: found for kind in sorted(TYPES) if (found := settings_of(kind))}
    rows = (f'"{kind}": {json.dumps(found)}' for kind, found in table.items())
    OUTPUT.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(len(table), "types,", sum(map(len, table.values())), "keys")


if __name__ == "__main__":
    main()
