"""Write tests/fixtures/medusa: tiny heads on models that are fixtures too, and what torch computes.

    python scripts/make_medusa_fixtures.py tests/fixtures

Needs torch and transformers (extra `train`); the tests that read the fixtures need neither.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

HEADS = 3
PROMPT = [5, 9, 12, 7, 33, 21, 8]
WRITTEN = [0, 14, 3, 60, 2]


@dataclass(frozen=True)
class Kind:
    """One fixture. base: below the fixtures. archive: written by torch.save."""

    base: str
    layers: int
    own_output: bool
    archive: bool = False


KINDS = {
    "llama-own": Kind("torch/llama", 2, own_output=True),
    "llama-own-archive": Kind("torch/llama", 1, own_output=True, archive=True),
    "llama-shared": Kind("torch/llama", 1, own_output=False),
    "t5-own": Kind("t5/own-head-scaled", 1, own_output=True),
    "t5-shared": Kind("t5/tied-scaled-relu", 2, own_output=False),
    "t5-unscaled": Kind("t5/tied-unscaled", 1, own_output=False, archive=True),
}


class Residual(nn.Module):
    """A layer of a head: x + silu(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


def build(kind: Kind, width: int, vocabulary: int) -> nn.ModuleList:
    """Random heads; their names in a state_dict are those of published files."""
    heads = nn.ModuleList()
    for _ in range(HEADS):
        parts: list[nn.Module] = [Residual(width) for _ in range(kind.layers)]
        if kind.own_output:
            parts.append(nn.Linear(width, vocabulary, bias=False))
        heads.append(nn.Sequential(*parts))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in heads.parameters():
            spread = 0.3 if weight.ndim == 1 else 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(spread * torch.randn(weight.shape, generator=generator))
    return heads


def expected(kind: Kind, directory: Path) -> tuple[nn.ModuleList, np.ndarray]:
    """The heads, and their logits (heads, vocabulary) after the last token of the input."""
    if kind.base.startswith("t5"):
        model = T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        memory = model.encoder(input_ids=torch.tensor([PROMPT])).last_hidden_state
        states = model.decoder(
            input_ids=torch.tensor([WRITTEN]), encoder_hidden_states=memory
        ).last_hidden_state
        written = json.loads((directory / "config.json").read_text())
        scale = model.config.d_model**-0.5 if written["scale_decoder_outputs"] else 1.0
    else:
        model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        states = model.model(input_ids=torch.tensor([PROMPT])).last_hidden_state
        scale = 1.0
    heads = build(kind, states.shape[-1], model.config.vocab_size)
    last = scale * states[0, -1]
    rows = [head(last) if kind.own_output else model.lm_head(head(last)) for head in heads]
    return heads, torch.stack(rows).numpy()


def main(root: Path) -> None:
    for name, kind in KINDS.items():
        directory = root / "medusa" / name
        directory.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            heads, logits = expected(kind, root / kind.base)
        weights = {key: value.detach().contiguous() for key, value in heads.state_dict().items()}
        if kind.archive:
            torch.save(weights, directory / "medusa_lm_head.pt")
        else:
            save_file(weights, directory / "medusa_lm_head.safetensors", {"format": "pt"})
        config = {
            "base_model_name_or_path": f"../../{kind.base}",
            "medusa_num_heads": HEADS,
            "medusa_num_layers": kind.layers,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokens = WRITTEN if kind.base.startswith("t5") else PROMPT
        np.savez_compressed(
            directory / "expected.npz",
            prompt=np.array(PROMPT),
            tokens=np.array(tokens),
            logits=logits,
        )
        print(name, logits.shape, float(np.abs(logits).max()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
