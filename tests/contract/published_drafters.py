"""Block drafters with the config.json and the tensors of published ones, at tiny sizes. The entries
are those that vLLM, SGLang, mlx-vlm and mlx-dspark read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..support.speculators import HEAD_DIM, HEADS, INNER, KV_HEADS, RANK, VOCABULARY, WIDTH
from ..support.tiny import complete

LAYERS, TAPS, EPS = 2, 2, 1e-6
GROUP, TOP_K = 4, 6
SELECTOR = ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")


@dataclass(frozen=True)
class Case:
    """A published drafter.

    Attributes:
        first: The slot that drafts the first token.
        slots: Number of slots.
        plus: Number that is added to the weights of norms as they are stored.
        rotated: Number of entries of a head that are rotated.
        proportional: Whether a head's periods of rotation are those of a head that is rotated
            whole.
        window: Number of positions that a slot sees, itself included.
        renamed: The published name of each name that differs, or of its start.
    """

    config: dict[str, Any]
    first: int = 0
    slots: int = 7
    markov: bool = True
    gemma: bool = False
    gated: bool = False
    sinks: bool = False
    causal: bool = False
    interleaved: bool = False
    noise_level: bool = False
    second: bool = False
    plus: float = 0.0
    rotated: int = HEAD_DIM
    proportional: bool = False
    yarn: bool = False
    window: int = 10**6
    kv_heads: int = KV_HEADS
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (WIDTH, TAPS * WIDTH),
            "hidden_norm.weight": (WIDTH,),
            "norm.weight": (WIDTH,),
        }
        for at in (f"layers.{number}." for number in range(LAYERS)):
            shapes |= {f"{at}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
            names = ["input_layernorm", "post_attention_layernorm"]
            if self.gemma:
                names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
                shapes[f"{at}layer_scalar"] = (1,)
            else:
                shapes[f"{at}self_attn.v_proj.weight"] = (self.kv_heads * HEAD_DIM, WIDTH)
            shapes |= {f"{at}{name}.weight": (WIDTH,) for name in names}
            queries = HEADS * HEAD_DIM * (2 if self.gated else 1)
            shapes[f"{at}self_attn.q_proj.weight"] = (queries, WIDTH)
            shapes[f"{at}self_attn.k_proj.weight"] = (self.kv_heads * HEAD_DIM, WIDTH)
            shapes[f"{at}self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
            shapes |= {f"{at}mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = (WIDTH, INNER)
            if self.second:
                for part in (f"{at}attention_conv", f"{at}mlp_conv"):
                    shapes[f"{part}.base_kernel"] = (2, 2, WIDTH)
                    shapes[f"{part}.kernel_projection.weight"] = (4 * WIDTH // GROUP, WIDTH)
            if self.sinks:
                shapes[f"{at}self_attn.attention_sink_bias"] = (HEADS,)
        if self.markov:
            shapes["markov_head.markov_w1.weight"] = (VOCABULARY, RANK)
            shapes["markov_head.markov_w2.weight"] = (VOCABULARY, RANK)
        if self.second:
            for part in ("predecessor", "successor"):
                shapes[f"candidate_selector.{part}_codebook"] = (VOCABULARY, RANK)
            shapes["candidate_selector.hidden_projection.weight"] = (RANK, WIDTH)
        if self.noise_level:
            shapes |= {"log_snr_embed.fc1.weight": (WIDTH, 128), "log_snr_embed.fc1.bias": (WIDTH,)}
            shapes |= {
                "log_snr_embed.fc2.weight": (WIDTH, WIDTH),
                "log_snr_embed.fc2.bias": (WIDTH,),
            }
        return shapes


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
CASES: dict[str, Case] = {
    name: Case(**complete(case, _DATA["parts"])) for name, case in _DATA["cases"].items()
}
"""A drafter's name -> its case. Part noise has entries of the target, which no drafter uses."""
