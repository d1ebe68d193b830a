"""Write tests/fixtures/drafters/mtp-*: tiny layers for multi-token prediction, and what others
compute with them.

    python scripts/make_mtp_fixtures.py tests/fixtures/drafters

Needs what make_drafter_fixtures.py needs. Qwen's layers are those of the package speculators, those
of DeepSeek-V3 and GLM-4.5 are transformers'. Both are called with the target's hidden states and
with what they made of them, from the beginning in every round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_drafter_fixtures import ACCEPTED, COUNT, PROMPT, VOCABULARY, WIDTH
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, EXPERTS, INNER, THETA = 4, 4, 12, 500.0
"""LAYERS: of the target that is not there."""
SHARED: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": INNER, "norm_topk_prob": True}
QWEN_MOE = {**MOE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 8}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": LAYERS,
}
ROUTED = {
    **MOE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}


@dataclass(frozen=True)
class Case:
    """One fixture. kind: model_type of the layer's configuration. config: beyond SHARED. rotary:
    the part of the head that turns. original: the files are laid out as those of the target's
    makers, and not as `speculators` has them. apart: each expert in tensors of its own. wrapped:
    the configuration is inside of another one."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    rotary: float = 1.0
    original: bool = True
    apart: bool = True
    wrapped: bool = False


QWEN35 = {**LINEAR, "mtp_num_hidden_layers": 1}
CASES: Mapping[str, Case] = {
    "mtp-qwen3": Case("qwen3", original=False),
    "mtp-qwen3-next": Case("qwen3_next", {**LINEAR, **QWEN_MOE}, 0.5, original=False),
    "mtp-qwen3-next-original": Case("qwen3_next", {**LINEAR, **QWEN_MOE}, 0.5),
    "mtp-qwen3.5-original": Case("qwen3_5_text", QWEN35, 0.5, wrapped=True),
    "mtp-qwen3.5-moe": Case("qwen3_5_moe_text", {**QWEN35, **QWEN_MOE}, 0.5, original=False),
    "mtp-qwen3.5-moe-original": Case(
        "qwen3_5_moe_text", {**QWEN35, **QWEN_MOE}, 0.5, apart=False, wrapped=True
    ),
    "mtp-deepseek-v3": Case("deepseek_v3", {**ROUTED, **LATENT}),
    "mtp-glm4-moe": Case("glm4_moe", {**ROUTED, "use_qk_norm": True}, 0.5),
    "mtp-glm4-moe-lite": Case("glm4_moe_lite", {**ROUTED, **LATENT}),
}
NAMES = {
    "input_proj": "fc",
    "final_layernorm": "norm",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "post_norm": "shared_head.norm",
}
"""What `speculators` and transformers call what Qwen's and DeepSeek's files call otherwise."""
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def configuration(case: Case) -> Any:
    """transformers' configuration of the layer."""
    rope = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": case.rotary}
    if case.kind.startswith("qwen3_5"):
        rope |= MROPE
    config = CONFIG_MAPPING[case.kind](**{**SHARED, **case.config, "rope_parameters": rope})
    config._attn_implementation = "eager"
    return config


def randomize(module: torch.nn.Module, zero_centered: bool) -> None:
    """Weights that nothing is like."""
    buffers = ((n, b) for n, b in module.named_buffers() if n.endswith("e_score_correction_bias"))
    for name, tensor in sorted([*module.named_parameters(), *buffers]):
        noise = torch.randn(tensor.shape)
        norm = tensor.ndim == 1 and "norm" in name
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.2
        tensor.data = scale * noise + (1 if norm and not zero_centered else 0)


def of_speculators(case: Case) -> tuple[torch.nn.Module, torch.nn.Module, Forward]:
    """The whole model, its layer, and what the layer makes of embeddings and hidden states."""
    config = MTPSpeculatorConfig(
        transformer_layer_config=configuration(case),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=COUNT)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = MTPDraftModel(config).eval()
    del model.verifier_lm_head  # as it does itself once it has the target
    [layer] = model.mtp_layers
    randomize(layer, zero_centered=case.kind != "qwen3")
    inner = config.transformer_layer_config

    def forward(embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(hidden))[None]
        thrice = places[None].expand(3, -1, -1) if case.kind.startswith("qwen3_5") else places
        return layer(
            hidden_states=hidden[None],
            token_embeddings=embedded[None],
            attention_mask=mask_of(inner, hidden, places),
            position_ids=places,
            position_embeddings=model.rotary_emb(hidden[None], thrice),
        )[0]

    return model, layer, forward


def of_transformers(case: Case) -> tuple[torch.nn.Module, torch.nn.Module, Forward]:
    """The same; the whole model is the target's."""
    config = configuration(case)
    model = AutoModelForCausalLM.from_config(config).eval()
    last = model.model.layers[-1]
    layer = MtpLayer(config, type(last), type(last.input_layernorm), LAYERS - 1).eval()
    randomize(layer, zero_centered=False)

    def forward(embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        # As its MtpModel counts: one more than the target.
        places = 1 + torch.arange(len(hidden))[None]
        return layer(
            embedded[None],
            hidden[None],
            position_embeddings=model.model.rotary_emb(hidden[None], position_ids=places),
            attention_mask=mask_of(config, hidden, places),
            position_ids=places,
            past_key_values=None,
        )[0]

    return model, layer, forward


def mask_of(config: Any, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each row sees those before it."""
    return create_causal_mask(
        config=config,
        inputs_embeds=hidden[None],
        attention_mask=None,
        past_key_values=None,
        position_ids=places,
    )


def chain(
    forward: Forward,
    embedding: torch.Tensor,
    head: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Logits of COUNT tokens behind `tokens`, (COUNT, vocabulary). hidden: of all but the last."""
    inputs, states, rows = tokens[1:], hidden, []
    for _ in range(COUNT):
        newest = forward(embedding[inputs], states)[-1]
        rows.append(head @ newest)
        inputs = torch.cat([inputs, rows[-1].argmax()[None]])
        states = torch.cat([states, newest[None]])
    return torch.stack(rows)


def named(layer: torch.nn.Module, case: Case) -> dict[str, torch.Tensor]:
    """The layer as the target's makers name and divide it."""
    tensors = {}
    for name, tensor in layer.state_dict().items():
        name = name.removeprefix("mtp_block.")
        part, _, rest = name.partition(".")
        around = part in NAMES or part in ("enorm", "hnorm", "eh_proj")
        name = f"{NAMES.get(part, part)}.{rest}" if around else name
        if case.kind.startswith("qwen"):
            name = f"mtp.{name}" if around else f"mtp.layers.0.{name}"
        else:
            name = f"model.layers.{LAYERS}.{name}"
        tensors |= divided(name, tensor) if case.apart else {name: tensor}
    return tensors


def divided(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts in tensors of their own."""
    path, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        both = {f"{path}.{n}": each.chunk(2) for n, each in enumerate(tensor)}
        return {
            f"{expert}.{name}.weight": half
            for expert, halves in both.items()
            for name, half in zip(("gate_proj", "up_proj"), halves, strict=True)
        }
    if part == "down_proj" and tensor.ndim == 3:
        return {f"{path}.{n}.down_proj.weight": each for n, each in enumerate(tensor)}
    return {name: tensor}


def config_json(case: Case) -> dict[str, Any]:
    """As the target's makers have it."""
    config = {**SHARED, **case.config, "model_type": case.kind, "hidden_act": "silu"}
    rope = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": case.rotary}
    if case.wrapped:
        config["rope_parameters"] = {**rope, **MROPE}
        kind = case.kind.removesuffix("_text")
        return {"model_type": kind, "tie_word_embeddings": False, "text_config": config}
    config |= {"rope_theta": THETA, "rope_scaling": None, "partial_rotary_factor": case.rotary}
    more = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return config | (more if case.kind == "qwen3_next" else {})


def write(directory: Path, case: Case) -> None:
    """One fixture: the layer's directory, and beside it what it was given and what it said."""
    make = of_speculators if case.kind.startswith("qwen") else of_transformers
    model, layer, forward = make(case)
    if case.original:
        tensors = {name: tensor.contiguous() for name, tensor in named(layer, case).items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        text = json.dumps(config_json(case), indent=2)
        (directory / "config.json").write_text(text, encoding="utf-8")
    else:
        model.save_pretrained(directory, safe_serialization=True)
        for other in directory.iterdir():
            if other.name not in ("config.json", "model.safetensors"):
                other.unlink()
    tokens = torch.randint(0, VOCABULARY, (PROMPT + sum(ACCEPTED) + len(ACCEPTED),))
    hidden = torch.randn(len(tokens), WIDTH)
    embedding, head = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH) / 2
    lengths, logits = [], []
    length = PROMPT
    for accepted in ACCEPTED:
        lengths.append(length)
        given = tokens[:length], hidden[: length - 1]
        logits.append(chain(forward, embedding, head, *given))
        length += accepted + 1
    rows = torch.stack(logits)
    reference = {
        "tokens": tokens.int(),
        "hidden": hidden,
        "lengths": torch.tensor(lengths).int(),
        "logits": rows,
        "drafted": rows.argmax(-1).int(),
        "embedding": embedding,
        "known": torch.arange(VOCABULARY).int(),
        "head": head,
    }
    save_file(reference, directory / "reference.st")


def main(where: Path) -> None:
    """All cases."""
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(100 + number)
        directory = where / name
        directory.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            write(directory, case)
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{name}: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
