"""Write tests/fixtures/gemma4_assistant: tiny targets and assistants of Gemma 4, and their drafts.

    python scripts/make_gemma4_fixtures.py tests/fixtures/gemma4_assistant

Needs torch and transformers; the tests that read the fixtures need neither. Every round is computed
from the beginning: the target sees the whole text, and lends the keys and values of all of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

VOCABULARY, WINDOW, COUNT = 40, 8, 4
PROMPT = 5
ACCEPTED = (0, 3, 1, 4, 0, 0, 2, 4, 1)
"""Of each round, before the next one."""
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
TARGET: Mapping[str, Any] = {
    **LAYER,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    # The last two layers have nothing to lend: they borrow from the two before them.
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 30.0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCABULARY,
}
DRAFT: Mapping[str, Any] = {
    **LAYER,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 0,
}
_modes = Gemma4TextConfig.kv_sharing_modes.fget


def sharing(config: Gemma4TextConfig) -> list[str | None]:
    """What each layer does with keys and values. transformers 5.23 asks for a layer that makes what
    others reuse, and an assistant has none."""
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    return _modes(config)


ORDERED = {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 3}
CASES: Mapping[str, Mapping[str, Any]] = {"dense": {}, "ordered": ORDERED}


def randomize(model: torch.nn.Module) -> None:
    """Weights that make texts wander; norms are about 1."""
    for name, parameter in sorted([*model.named_parameters(), *model.named_buffers()]):
        noise = torch.randn(parameter.shape)
        if "token_ordering" in name:
            parameter.data = torch.randperm(VOCABULARY)
        elif parameter.ndim == 1 and ("norm" in name or "scalar" in name):
            # Scores are not scaled: what is looked at has to change gently.
            parameter.data = (0.4 if "q_norm" in name else 1.0) * (1 + 0.2 * noise)
        elif parameter.ndim > 1:
            parameter.data = noise * parameter.shape[-1] ** -0.5


def save(directory: Path, model: torch.nn.Module, config: Mapping[str, Any]) -> None:
    """As the Hub has them. The head is tied to the embedding."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def drafts(
    target: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM, tokens: torch.Tensor
) -> torch.Tensor:
    """Logits of COUNT tokens behind `tokens`, (COUNT, vocabulary); the target saw all but one."""
    seen = target.model(
        tokens[None, :-1],
        use_cache=False,
        return_shared_kv_states=True,
        output_hidden_states=True,
    )
    keys, values = seen.shared_kv_states[SLIDING]
    within = slice(max(0, len(tokens) - WINDOW), None)
    lent = {
        FULL: seen.shared_kv_states[FULL],
        SLIDING: (keys[:, :, within], values[:, :, within]),
    }
    token, state = tokens[None, -1:], seen.last_hidden_state[:, -1:]
    rows = []
    for _ in range(COUNT):
        told = assistant(
            inputs_embeds=torch.cat([target.model.embed_tokens(token), state], dim=-1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=lent,
        )
        token, state = told.logits.argmax(-1), told.last_hidden_state
        rows.append(told.logits[0, 0])
    return torch.stack(rows)


def write(where: Path, name: str, changes: Mapping[str, Any]) -> None:
    """One fixture."""
    target = Gemma4ForCausalLM(Gemma4TextConfig(**TARGET)).eval()
    config = {"backbone_hidden_size": TARGET["hidden_size"], **changes}
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=Gemma4TextConfig(**DRAFT), **config)
    ).eval()
    for model in (target, assistant):
        model.set_attn_implementation("eager")
        randomize(model)
        model.tie_weights()
    save(where / name / "target", target, TARGET)
    told = {"model_type": "gemma4_assistant", **config, "text_config": DRAFT}
    save(where / name / "assistant", assistant, told)
    tokens = torch.randint(0, VOCABULARY, (PROMPT + sum(ACCEPTED) + len(ACCEPTED),))
    lengths, logits = [], []
    length = PROMPT
    for accepted in ACCEPTED:
        lengths.append(length)
        logits.append(drafts(target, assistant, tokens[:length]))
        length += accepted + 1
    rows = torch.stack(logits)
    reference = {
        "tokens": tokens.int(),
        "lengths": torch.tensor(lengths).int(),
        "logits": rows,
        "drafted": rows.argmax(-1).int(),
    }
    save_file(reference, where / name / "reference.st")


def main(where: Path) -> None:
    """All cases."""
    for number, (name, changes) in enumerate(CASES.items()):
        torch.manual_seed(number)
        with torch.no_grad(), patch.object(Gemma4TextConfig, "kv_sharing_modes", property(sharing)):
            write(where, name, changes)
        print(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
