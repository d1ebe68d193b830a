"""Write tests/fixtures/drafters: tiny drafters on hidden states, and what `speculators` computes.

    python scripts/make_drafter_fixtures.py tests/fixtures/drafters

Needs torch, transformers and the package speculators; the tests that read the fixtures need none of
them. Every round is computed from the beginning, from the target's hidden states alone, so that
what a drafter keeps from round to round is compared with what it should be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as parallel_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

WIDTH, VOCABULARY, DRAFTED, COUNT = 16, 40, 24, 4
PROMPT = 5
ACCEPTED = (0, 3, 1, 4, 0, 0, 2, 4, 1)
"""Of each round, before the next one."""
LAYER: Mapping[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Case:
    """One fixture. layer, config: changes of either configuration. authors: the file is written as
    EAGLE's authors have it, by torch.save."""

    kind: str
    layer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    taps: int = 3
    authors: bool = False


BLOCK: Mapping[str, Any] = {"block_size": COUNT, "mask_token_id": 3}
SLIDING: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WHOLE = {"draft_vocab_size": VOCABULARY}
CASES: Mapping[str, Case] = {
    "eagle3-authors": Case("eagle3", authors=True),
    "eagle3-residual": Case(
        "eagle3",
        {"model_type": "qwen3", "rope_theta": 500.0},
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
    "eagle3-fc-norm": Case(
        "eagle3",
        {"num_hidden_layers": 2, "rope_parameters": SCALED},
        {"fc_norm": True, "norm_output": True, **WHOLE},
        taps=2,
    ),
    "dflash": Case("dflash", SLIDING, {**BLOCK, "block_size": COUNT + 1}),
    "dflash-not-causal": Case(
        "dflash",
        {**SLIDING, "rope_theta": 500.0},
        {**BLOCK, **WHOLE, "block_size": COUNT + 1, "sliding_window_non_causal": True},
        taps=2,
    ),
    **{
        f"dspark-{head}": Case("dspark", config={**BLOCK, "markov_head_type": head})
        for head in ("vanilla", "gated", "rnn")
    },
    "dspark-whole": Case(
        "dspark",
        {"num_hidden_layers": 2},
        {
            **BLOCK,
            **WHOLE,
            "block_size": COUNT + 1,
            "markov_head_type": "rnn",
            "sample_from_anchor": False,
        },
    ),
    "dflash2": Case(
        "dflash2",
        SLIDING,
        {
            **BLOCK,
            **WHOLE,
            "block_size": COUNT + 1,
            "conv_kernel_size": 3,
            "conv_group_size": 4,
            "selector_rank": 6,
            "selector_top_k": 5,
        },
    ),
    "peagle": Case("peagle", {"num_hidden_layers": 2}, {"mask_token_id": 3}),
    "peagle-normed": Case(
        "peagle",
        {"model_type": "qwen3", "num_hidden_layers": 3, "rope_theta": 500.0},
        {
            "mask_token_id": 5,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            **WHOLE,
        },
        taps=2,
    ),
}
CONFIGS = {
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}


def build(case: Case) -> SpeculatorModel:
    """A drafter of random weights."""
    chained = case.kind in ("eagle3", "peagle")
    usual = "llama" if chained else "qwen3"
    layer = {**LAYER, **case.layer}
    layers = {"llama": LlamaConfig, "qwen3": Qwen3Config}[layer.pop("model_type", usual)]
    config_class, model_class = CONFIGS[case.kind]
    ids = "eagle_aux_hidden_state_layer_ids" if chained else None
    more = {"markov_rank": 6, "enable_confidence_head": True} if case.kind == "dspark" else {}
    config = config_class(
        **{
            "transformer_layer_config": layers(**layer),
            "draft_vocab_size": DRAFTED,
            ids or "aux_hidden_state_layer_ids": [2, 5, 7][: case.taps],
            "speculators_config": SpeculatorsConfig(
                algorithm=case.kind,
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=COUNT)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
            **more,
            **case.config,
        }
    )
    model = model_class(config).eval()
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape)
        near_one = parameter.ndim == 1 and "norm" in name
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
        parameter.data = 1 + 0.2 * noise if near_one else scale * noise
    if model.d2t is not None:
        known = torch.sort(torch.randperm(VOCABULARY)[:DRAFTED]).values
        model.d2t.copy_(known - torch.arange(DRAFTED))
        model.t2d.copy_(torch.isin(torch.arange(VOCABULARY), known))
    return model


@dataclass
class Heard:
    """What a module returned, call by call."""

    results: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, module: torch.nn.Module, given: Any, result: torch.Tensor) -> None:
        self.results.append(result.detach())


def target_ids(model: SpeculatorModel, drafted: torch.Tensor) -> torch.Tensor:
    """The target's ids of the drafter's."""
    return drafted if model.d2t is None else drafted + model.d2t[drafted]


def chain(
    model: SpeculatorModel, tokens: torch.Tensor, hidden: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Logits of COUNT tokens behind `tokens`, (COUNT, the drafter's vocabulary). hidden: of all but
    the last. Training feeds the true tokens in the place of the drafted ones, so that these stand
    there, one more each time."""
    row = hidden.shape[0] - 1
    inputs = torch.cat([tokens[1:], torch.zeros(COUNT, dtype=torch.long)])
    states = torch.cat([hidden, torch.zeros(COUNT, hidden.shape[1])])
    rows = []
    for step in range(COUNT):
        heard = Heard()
        with model.lm_head.register_forward_hook(heard):
            model(
                hidden_states=states[None],
                input_ids=inputs[None],
                document_ids=torch.zeros(1, len(inputs), dtype=torch.long),
                ttt_steps=step + 1,
            )
        rows.append(heard.results[step][0, row])
        inputs[row + 1 + step] = target_ids(model, rows[-1].argmax())
    return {"logits": torch.stack(rows)}


def parallel(
    model: SpeculatorModel, tokens: torch.Tensor, hidden: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The same in one pass: behind the newest row, places of depth 1 and more."""
    row = hidden.shape[0] - 1
    inputs = torch.cat([tokens[1:], torch.zeros(COUNT, dtype=torch.long)])
    states = torch.cat([hidden, torch.zeros(COUNT, hidden.shape[1])])
    anchors = torch.cat([torch.arange(row + 1), torch.full((COUNT - 1,), row)])
    depths = torch.cat([torch.zeros(row + 1, dtype=torch.long), torch.arange(1, COUNT)])
    heard = Heard()
    with (
        model.lm_head.register_forward_hook(heard),
        patch.object(parallel_core, "generate_cod_sample_indices", lambda **_: (anchors, depths)),
    ):
        model(
            hidden_states=states[None],
            input_ids=inputs[None],
            document_ids=torch.zeros(1, len(inputs), dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, len(inputs), WIDTH),
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    return {"logits": heard.results[0][0, row:]}


def block(
    model: SpeculatorModel, tokens: torch.Tensor, hidden: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The same, of a block whose anchor is the last of `tokens`; of DSpark also how likely each
    token is to stay."""
    anchor, size = len(tokens) - 1, model.block_size
    behind = 2 * size
    inputs = torch.cat([tokens, torch.zeros(behind, dtype=torch.long)])
    states = torch.cat([hidden, torch.zeros(behind + 1, hidden.shape[1])])
    mask = torch.zeros(1, len(inputs))
    mask[0, anchor] = 1
    states_of_slots, logits, *_ = model._backbone_forward(
        hidden_states=states[None],
        input_ids=inputs[None],
        loss_mask=mask,
        verifier_last_hidden_states=torch.zeros(1, len(inputs), WIDTH),
        document_ids=torch.zeros(1, len(inputs), dtype=torch.long),
        max_anchors=1,
    )
    skipped = 0 if model.config.sample_from_anchor else 1
    rows = logits[0, :size]
    head = getattr(model, "markov_head", None)
    selector = getattr(model, "candidate_selector", None)
    confidence = getattr(model, "confidence_head", None)
    before = torch.zeros(1, size, dtype=torch.long)
    before[0, : skipped + 1] = tokens[-1]
    made, chances = [], []
    for slot in range(skipped, size):
        row = rows[slot]
        if confidence is not None:
            told = [states_of_slots[0, slot]]
            if model.config.confidence_head_with_markov:
                told.append(head.prev_embeddings(before[0, slot]))
            chances.append(confidence(torch.cat(told, dim=-1)).sigmoid())
        if head is not None:
            bias = head.block_bias(prev_token_ids=before, hidden_states=states_of_slots[:, :size])
            row = row + bias[0, slot]
        if selector is not None:
            ids, scores = selector.select(row, states_of_slots[0, slot], before[0, slot])
            row = torch.full_like(row, -torch.inf).scatter(-1, ids, scores)
        made.append(row)
        if slot + 1 < size:
            before[0, slot + 1] = target_ids(model, row.argmax())
    told = {"chances": torch.stack(chances)[:COUNT]} if chances else {}
    return {"logits": torch.stack(made)[:COUNT], **told}


def write(directory: Path, case: Case) -> None:
    """One fixture: the drafter's directory, and beside it what it was given and what it said."""
    model = build(case)
    model.save_pretrained(directory, safe_serialization=True)
    for other in set(directory.iterdir()) - {
        directory / name for name in ("config.json", "model.safetensors")
    }:
        other.unlink()
    tokens = torch.randint(0, VOCABULARY, (PROMPT + sum(ACCEPTED) + len(ACCEPTED),))
    hidden = torch.randn(len(tokens), case.taps * WIDTH)
    lengths, told = [], []
    length = PROMPT
    for accepted in ACCEPTED:
        lengths.append(length)
        draft = {"eagle3": chain, "peagle": parallel}.get(case.kind, block)
        told.append(draft(model, tokens[:length], hidden[: length - 1]))
        length += accepted + 1
    every = {name: torch.stack([each[name] for each in told]) for name in told[0]}
    rows = every["logits"]
    reference = {
        **every,
        "tokens": tokens.int(),
        "hidden": hidden,
        "lengths": torch.tensor(lengths).int(),
        "drafted": target_ids(model, rows.argmax(-1)).int(),
        "embedding": model.embed_tokens.weight.data,
        "known": target_ids(model, torch.arange(rows.shape[-1])).int(),
    }
    if model.d2t is None:
        reference["head"] = model.lm_head.weight.data
    if case.authors:
        as_authors(directory, case)
    save_file(
        {name: tensor.contiguous() for name, tensor in reference.items()},
        directory / "reference.st",
    )


def as_authors(directory: Path, case: Case) -> None:
    """Write the drafter over as EAGLE's authors do: other names, no embedding, a torch archive."""
    file = directory / "model.safetensors"
    named = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in load_file(file).items()
        if name != "embed_tokens.weight"
    }
    file.unlink()
    torch.save(named, directory / "pytorch_model.bin")
    config = {key: each for key, each in LAYER.items() if key != "attn_implementation"} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "rms_norm_eps": 1e-6,
        "draft_vocab_size": DRAFTED,
        "bias": False,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def main(where: Path) -> None:
    """All cases."""
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(number)
        directory = where / name
        directory.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            write(directory, case)
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{name}: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
