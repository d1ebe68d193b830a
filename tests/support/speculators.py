"""Drafters of each kind and dialect on disk, tiny and random."""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

WIDTH, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 64, 4, 2, 8, 48
RANK = 8
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
Shapes = dict[str, tuple[int, ...]]


def layer(name: str, inputs: int, width: int = WIDTH, encoder: int | None = None) -> Shapes:
    """Return the tensors of a layer. encoder: Width of the encoder's output, if the layer attends
    to it."""
    return {
        **({} if encoder is None else _encoder_attention(name, width, encoder)),
        f"{name}.input_layernorm.weight": (width,),
        f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{name}.self_attn.o_proj.weight": (width, HEADS * HEAD_DIM),
        f"{name}.post_attention_layernorm.weight": (width,),
        f"{name}.mlp.gate_proj.weight": (INNER, width),
        f"{name}.mlp.up_proj.weight": (INNER, width),
        f"{name}.mlp.down_proj.weight": (width, INNER),
    }


def _encoder_attention(name: str, width: int, encoder: int) -> Shapes:
    return {
        f"{name}.encoder_attn_layernorm.weight": (width,),
        f"{name}.encoder_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{name}.encoder_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, encoder),
        f"{name}.encoder_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, encoder),
        f"{name}.encoder_attn.o_proj.weight": (width, HEADS * HEAD_DIM),
    }


def random(shapes: Shapes, seed: int = 0) -> dict[str, mx.array]:
    """Weights that make texts wander; norms are about 1."""
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    made = {}
    for (name, shape), key in zip(sorted(shapes.items()), keys, strict=True):
        noise = mx.random.normal(shape, key=key)
        made[name] = 1 + 0.2 * noise if len(shape) == 1 else 2 * noise * shape[-1] ** -0.5
    return made


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Path:
    """A directory as the Hub has them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tensors))
    return directory


def every_other(drafted: int) -> mx.array:
    """d2t of a drafter that knows the tokens 1, 3, 5, ..."""
    return mx.arange(drafted, dtype=mx.int64) + 1


def eagle3(
    directory: Path,
    *,
    drafted: int | None = VOCABULARY // 2,
    hidden_count: int = 3,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    encoder: int | None = None,
    extra: Shapes | None = None,
    tensors: Mapping[str, mx.array] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """EAGLE-3 as its authors write it. drafted: size of its own vocabulary; None takes the
    target's head. encoder: width of the target's encoder, to which it then attends. extra: more
    tensors. tensors: in the place of others. changes: of config.json."""
    shapes = {
        "fc.weight": (width, hidden_count * width),
        "norm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        **layer("midlayer", 2 * width, width, encoder),
        **(extra or {}),
    }
    if encoder is not None:
        shapes["encoder_norm.weight"] = (encoder,)
        changes = {"encoder_attention": True, "encoder_hidden_size": encoder, **changes}
    if drafted is not None:
        shapes["lm_head.weight"] = (drafted, width)
    made = random(shapes, seed)
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": vocabulary}
    config["hidden_size"] = width
    if drafted is not None:
        config["draft_vocab_size"] = drafted
        made["d2t"] = every_other(drafted)
        made["t2d"] = mx.arange(vocabulary) % 2 == 1
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 2][:hidden_count]
    return write(directory, {**config, **changes}, {**made, **(tensors or {})})


def eagle(
    directory: Path,
    *,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    extra: Shapes | None = None,
    tensors: Mapping[str, mx.array] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write an EAGLE-1 in its authors' layout, with the target's embedding. For the arguments see
    `eagle3`."""
    shapes = {
        "fc.weight": (width, 2 * width),
        "embed_tokens.weight": (vocabulary, width),
        **layer("layers.0", width, width),
        **(extra or {}),
    }
    del shapes["layers.0.input_layernorm.weight"]
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary}
    # Nothing normalizes what is fed back.
    adding = ("fc.weight", "o_proj.weight", "down_proj.weight")
    made = {
        name: 0.3 * array if name.endswith(adding) else array
        for name, array in random(shapes, seed).items()
    }
    made |= tensors or {}
    return write(directory, {**config, "hidden_size": width, **changes}, made)


def peagle(
    directory: Path,
    *,
    hidden_count: int = 3,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    extra: Shapes | None = None,
    **settings: Any,
) -> Path:
    """P-EAGLE with two layers and an embedding of its own; the rest as `eagle3`."""
    tensors = {
        "mask_hidden": (1, 1, hidden_count * width),
        "embed_tokens.weight": (vocabulary, width),
        **layer("layers.1", width, width),
        **(extra or {}),
    }
    sizes: dict[str, Any] = {"hidden_count": hidden_count, "vocabulary": vocabulary, "width": width}
    usual = {"num_hidden_layers": 2, "mask_token_id": 3}
    return eagle3(directory, extra=tensors, **{**sizes, **usual, **settings})


def speculators_eagle3(
    directory: Path, *, inner: Mapping[str, Any] | None = None, **settings: Any
) -> Path:
    """The same as `speculators` writes it. inner: changes of the layer's configuration."""
    eagle3(directory, **settings)
    config = json.loads((directory / "config.json").read_text())
    tensors = mx.load(str(directory / "model.safetensors"))
    top = {key: config.pop(key) for key in list(config) if key not in LLAMA}
    top |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**config, **(inner or {})},
    }
    named = {name.replace("midlayer.", "layers.0."): array for name, array in tensors.items()}
    return write(directory, top, named)


def dflash(
    directory: Path,
    *,
    layers: int = 2,
    hidden_count: int = 2,
    markov: str | None = None,
    second: bool = False,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    encoder: int | None = None,
    extra: Shapes | None = None,
    tensors: Mapping[str, mx.array] | None = None,
    nested: Mapping[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """DFlash as its authors write it, the `second` version of it, or with `markov` a DSpark as
    SpecForge writes it. nested: changes of dflash_config. The rest as in `eagle3`."""
    shapes = {
        "fc.weight": (width, hidden_count * width),
        "norm.weight": (width,),
        "hidden_norm.weight": (width,),
        **(extra or {}),
    }
    if encoder is not None:
        shapes["encoder_norm.weight"] = (encoder,)
        changes = {"encoder_attention": True, "encoder_hidden_size": encoder, **changes}
    for number in range(layers):
        shapes |= layer(f"layers.{number}", width, width, encoder)
        for norm in ("q_norm", "k_norm"):
            shapes[f"layers.{number}.self_attn.{norm}.weight"] = (HEAD_DIM,)
    method: dict[str, Any] = {"mask_token_id": 3, "target_layer_ids": [0, 1][:hidden_count]}
    if markov is not None:
        method |= {"markov_rank": RANK, "markov_head_type": markov, "projector_type": "dspark"}
        shapes["markov_head.markov_w1.weight"] = (vocabulary, RANK)
        shapes["markov_head.markov_w2.weight"] = (vocabulary, RANK)
        shapes["confidence_head.proj.weight"] = (1, width + RANK)
        shapes["confidence_head.proj.bias"] = (1,)
    if markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, width + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    if markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + width)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    if second:
        method |= {"conv_group_size": 4, "conv_kernel_size": 2}
        method |= {"selector_rank": RANK, "selector_top_k": 6}
        for part in ("predecessor", "successor"):
            shapes[f"candidate_selector.{part}_codebook"] = (vocabulary, RANK)
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, width)
        for number, part in itertools.product(range(layers), ("attention_conv", "mlp_conv")):
            shapes[f"layers.{number}.{part}.base_kernel"] = (2, 2, width)
            shapes[f"layers.{number}.{part}.kernel_projection.weight"] = (width, width)
    name = "DSpark" if markov else f"DFlash{2 if second else ''}"
    config = {
        **LLAMA,
        "model_type": "qwen3",
        "architectures": [f"{name}DraftModel"],
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "block_size": 4,
        "dflash_config": {**method, **(nested or {})},
    }
    return write(directory, {**config, **changes}, {**random(shapes, seed), **(tensors or {})})


def mtp(
    directory: Path,
    *,
    vocabulary: int = VOCABULARY,
    width: int = WIDTH,
    extra: Shapes | None = None,
    tensors: Mapping[str, mx.array] | None = None,
    inner: Mapping[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A layer for multi-token prediction as `speculators` writes it, of Qwen 3's kind. inner:
    changes of the layer's configuration. The rest as in `eagle3`."""
    shapes = layer("mtp_layers.0", width, width) | {
        f"mtp_layers.0.{norm}_layernorm.weight": (width,) for norm in ("hidden", "token", "final")
    }
    shapes["mtp_layers.0.input_proj.weight"] = (width, 2 * width)
    for norm in ("q_norm", "k_norm"):
        shapes[f"mtp_layers.0.self_attn.{norm}.weight"] = (HEAD_DIM,)
    sizes = {"model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": width}
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "transformer_layer_config": {**LLAMA, **sizes, **(inner or {})},
    }
    made = {**random({**shapes, **(extra or {})}, seed), **(tensors or {})}
    return write(directory, {**config, **changes}, made)


MAKERS: dict[str, Callable[..., Path]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "peagle": peagle,
    "dflash": dflash,
    "dflash2": lambda directory, **settings: dflash(directory, second=True, **settings),
    "dspark": lambda directory, **settings: dflash(directory, markov="gated", **settings),
    "mtp": mtp,
}
"""A kind of drafter -> the function that writes one."""
