"""Architectures that can be read from GGUF files, and how llama.cpp's converter changes each."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import first_line
from ...system import open_files_kept
from ..tensors import Malformed
from .gguf_blocks import TABLES
from .gguf_header import Metadata, Stored

GGUF_EMBEDDING, GGUF_HEAD = "token_embd.weight", "output.weight"


@dataclass
class Finder:
    """Collector of a model's tensors. Methods raise Malformed for missing tensors and wrong shapes.
    tensors: Name in the file -> tensor. found: Hugging Face's name -> tensor."""

    tensors: Mapping[str, Stored]
    found: dict[str, Stored] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise Malformed(f"lacks the tensor {name}: download it again")
        return self.tensors[name].shape

    def read(self, name: str, count: int) -> np.ndarray[Any, Any]:
        """Return at most `count` first rows of a tensor, float32."""
        return np.array(self.tensors[name].rows(count).astype(mx.float32))

    def take(self, hf_name: str, name: str, wanted: tuple[int, ...], **how: Any) -> None:
        """Collect a tensor. how: Its last attributes; see `Stored`."""
        shape = self.shape(name)
        if shape != wanted and (1, *shape) != wanted:
            raise Malformed(
                f"is damaged: {name} has shape {shape} where its metadata asks for {wanted}"
            )
        self.found[hf_name] = replace(self.tensors[name], shape=wanted, **how)

    @property
    def left(self) -> set[str]:
        return self.tensors.keys() - {stored.name for stored in self.found.values()}

    def check_left(self, model_type: str, *expected: str) -> None:
        if extra := self.left - {*expected}:
            raise Malformed(f"holds {min(extra)}, which a {model_type} model does not have here")


def _name_map(architecture: str, layers: int) -> Any:
    """Return the gguf package's map from names of Hugging Face to names in files. Raises
    Malformed."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if architecture not in numbers:
        raise Malformed(f"holds {architecture} weights, which the gguf package is too old for")
    return get_tensor_name_map(numbers[architecture], layers)


@dataclass(frozen=True)
class GgufFamily:
    """The properties of an architecture in GGUF files.

    Attributes:
        model_type: Hugging Face's name.
        stated: Key of config.json -> key and type in the metadata, in addition to the sizes.
        constant: Entries of config.json that the metadata lack.
        epsilon: The key in config.json of the norms' epsilon.
        permuted: Whether rows of rotary heads are in the order of Meta's code.
        shifted: Whether the weights w of norms are stored as 1 + w.
        partial: Whether rotation may apply to only a part of each head.
        scales: Whether mlx-lm supports scaled rotary positions for this family.
        largest: The number of layers of the model whose attention is scaled by hidden size over
            heads instead of head width; 0 if there is none.
    """

    model_type: str
    stated: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)
    epsilon: str = "rms_norm_eps"
    permuted: bool = False
    shifted: bool = False
    partial: bool = False
    scales: bool = False
    largest: int = 0


_SPELLED = {"text": "", "smollm3": "SmolLM3", "stablelm": "StableLm"}
"""Part of a model_type -> its spelling in "architectures", if it is not capitalized as usual."""
_VALUE_TYPES = {"int": int, "float": float, "bool": bool}
GGUF_FAMILIES = {name: GgufFamily(**entry) for name, entry in TABLES["families"].items()}
"""Architecture -> its family."""
WITH_EXPERTS = "llama with experts"
"""The family of a file of the architecture llama that has experts."""
_ROPE_FREQS = "rope_freqs.weight"
_ORIGINAL_LENGTH, _LOW, _HIGH = 8192, 1.0, 4.0
"""Constants of Llama 3.1's rotary scaling, which all Llama models since 3.1 share."""
_ALWAYS = ("architectures", "hidden_act", "max_position_embeddings", "tie_word_embeddings")
"""Keys of config.json that are written even if mlx-lm's arguments lack them."""
_MIXTRAL_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def describe(metadata: Metadata, finder: Finder) -> dict[str, Any]:
    """Return config.json of the model, and collect the tensors in `finder`. Raises Malformed."""
    architecture, kind = metadata.architecture, metadata.get("general.type", str, "model")
    if kind != "model":
        raise Malformed(f"holds no model but {kind!r:.40}: give the file of the model")
    if architecture == "t5":
        return _describe_t5(metadata, finder)
    if architecture == "t5encoder":
        raise Malformed(_ENCODER_ALONE)
    known = [name for name in GGUF_FAMILIES if name != WITH_EXPERTS]
    if architecture not in known:
        these = f"of GGUF files {', '.join((*known, 't5'))} are read"
        raise Malformed(f"holds a model of the architecture {architecture!r:.40}; {these}")
    if "blk.0.ffn_gate.0.weight" in finder.tensors:
        raise Malformed("stores every expert on its own, as files of 2023: take a newer file")
    experts = architecture == "llama" and metadata.get(".expert_count", int, 0)
    family = GGUF_FAMILIES[WITH_EXPERTS if experts else architecture]
    config = _config(metadata, family, finder)
    scaling = _scaling(metadata, finder, config["head_dim"], config["rope_theta"])
    if scaling is not None:
        if not family.scales:
            raise Malformed(f"scales positions of a {family.model_type}, which mlx-lm does not")
        config["rope_scaling"] = scaling
    model, arguments = _model(config)
    _take_tensors(metadata, finder, family, config, model)
    finder.check_left(family.model_type, _ROPE_FREQS)
    keys = {field.name for field in dataclasses.fields(arguments)} | {*_ALWAYS}
    return {key: value for key, value in config.items() if key in keys}


def _config(metadata: Metadata, family: GgufFamily, finder: Finder) -> dict[str, Any]:
    """Return config.json with the keys of all families."""
    heads = metadata.get(".attention.head_count", int)
    hidden = metadata.get(".embedding_length", int)
    inner = metadata.get(".feed_forward_length", int)
    shape = finder.shape(GGUF_EMBEDDING)
    width = metadata.get(".attention.key_length", int, hidden // heads)
    if width != metadata.get(".attention.value_length", int, width):
        raise Malformed("has keys and values of different widths, which is not supported")
    key_heads = metadata.get(".attention.head_count_kv", int, heads)
    layers = _layers(finder, "blk", metadata.get(".block_count", int))
    epsilon = "rms_epsilon" if family.epsilon == "rms_norm_eps" else "epsilon"
    spelled = (_SPELLED.get(part, part.capitalize()) for part in family.model_type.split("_"))
    return {
        "model_type": family.model_type,
        "architectures": [f"{''.join(spelled)}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": width,
        "vocab_size": shape[0],
        "max_position_embeddings": metadata.get(".context_length", int),
        family.epsilon: metadata.get(f".attention.layer_norm_{epsilon}", float),
        "rope_theta": metadata.get(".rope.freq_base", float, 10000.0),
        "partial_rotary_factor": _rotated_part(metadata, family, width),
        "query_pre_attn_scalar": hidden // heads if layers == family.largest else width,
        "tie_word_embeddings": GGUF_HEAD not in finder.tensors,
        "attention_bias": "blk.0.attn_q.bias" in finder.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in finder.tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in finder.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in finder.tensors,
        **family.constant,
        **{
            name: metadata.get(key, _VALUE_TYPES[kind])
            for name, (key, kind) in family.stated.items()
        },
    }


def _layers(finder: Finder, prefix: str, count: int) -> int:
    """Return a number of layers. Raises Malformed if the file does not have the last layer, since a
    model with thousands of layers would take long before a tensor is missed."""
    if not any(name.startswith(f"{prefix}.{count - 1}.") for name in finder.tensors):
        raise Malformed(f"is damaged: it lacks the last of its {count} layers: download it again")
    return count


def _rotated_part(metadata: Metadata, family: GgufFamily, width: int) -> float:
    """Return the share of a head's width that is rotated. mlx-lm computes int(share * width), so
    the share is rounded up if necessary."""
    rotated = metadata.get(".rope.dimension_count", int, width)
    if not 2 <= rotated <= width or rotated % 2 or not (rotated == width or family.partial):
        raise Malformed("turns only part of each head's width, which is not supported")
    part = rotated / width
    return part if int(part * width) == rotated else (rotated + 0.25) / width


def _model(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's model with lazy arrays, and the class of its arguments."""
    with open_files_kept():
        from mlx_lm.utils import _get_classes

    try:
        model, arguments = _get_classes(dict(config))
        return model(arguments.from_dict(dict(config))), arguments
    except Exception as problem:  # mlx-lm does not validate, so any exception may occur
        reason = first_line(problem)
        raise Malformed(f"is no {config['model_type']} for mlx-lm: {reason:.200}") from None


def _take_tensors(
    metadata: Metadata, finder: Finder, family: GgufFamily, config: Mapping[str, Any], model: Any
) -> None:
    from mlx.utils import tree_flatten

    names = _name_map(metadata.architecture, config["num_hidden_layers"])
    turned = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    able = {f"{p}.weight" for p, m in model.named_modules() if hasattr(m, "to_quantized")}
    # mlx-lm makes the head of some tied models and drops it when weights are loaded.
    ties = config["tie_word_embeddings"] and hasattr(model, "tie_word_embeddings")
    for hf_name, array in tree_flatten(model.parameters()):
        if hf_name == "lm_head.weight" and ties:
            continue
        gguf_name = names.get_name(_name_in_map(hf_name), (".weight", ".bias"))
        if gguf_name is None:
            raise Malformed(f"cannot hold {hf_name}, which the model needs")
        heads = turned.get(hf_name.split(".")[-2], 0) if family.permuted else 0
        excess = 1 if family.shifted and gguf_name.endswith("norm.weight") else 0
        how = {"heads": heads, "excess": excess, "is_matrix": hf_name in able}
        finder.take(hf_name, gguf_name, array.shape, **how)


def _name_in_map(hf_name: str) -> str:
    """Return the name for the gguf package of mlx-lm's tensor. Joined experts differ."""
    block, _, part = hf_name.rpartition(".switch_mlp.")
    if block.endswith("block_sparse_moe"):
        part = f"{_MIXTRAL_PARTS[part.split('.')[0]]}.weight"
    return f"{block}.experts.{part}" if block else hf_name


def _scaling(metadata: Metadata, finder: Finder, width: int, theta: float) -> dict[str, Any] | None:
    kind = metadata.get(".rope.scaling.type", str, "none")
    old = metadata.get(".rope.scale_linear", float, 1.0)
    factor = metadata.get(".rope.scaling.factor", float, old)
    if _ROPE_FREQS in finder.tensors:
        return _llama3(finder.read(_ROPE_FREQS, width // 2), width, theta)
    if kind not in ("none", "linear"):
        raise Malformed(f"scales rotary positions by {kind!r:.40}, which is not supported")
    return None if factor in (0, 1) else {"rope_type": "linear", "type": "linear", "factor": factor}


def _llama3(factors: np.ndarray[Any, Any], width: int, theta: float) -> dict[str, Any] | None:
    """Return Llama 3.1's scaling if it gives `factors`, the divisors of the rotary frequencies."""
    if (factors == 1).all():
        return None
    factor = float(factors.max())
    with np.errstate(all="ignore"):  # invalid values fail the comparison below
        waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
        smooth = np.clip((_ORIGINAL_LENGTH / waves - _LOW) / (_HIGH - _LOW), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise Malformed(
            f"has {_ROPE_FREQS} that are not those of Llama 3.1, which is not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    }


_ENCODER_ALONE = "holds an encoder alone, which cannot generate text"
_SAMPLED_ROWS = 256
"""Rows that are read to compare the head with the embedding."""
_SAME_DIRECTION = 0.8
"""Cosine above which a head counts as a copy of the embedding in another quantization. The cosine
of a head that was trained separately is near 0."""


def _describe_t5(metadata: Metadata, finder: Finder) -> dict[str, Any]:
    if "dec.blk.0.attn_norm.weight" not in finder.tensors:
        raise Malformed(_ENCODER_ALONE)
    layers = _layers(finder, "enc.blk", metadata.get(".block_count", int))
    decoder_layers = metadata.get(".decoder_block_count", int, layers)
    _layers(finder, "dec.blk", decoder_layers)
    own_head = _has_own_head(finder)
    every_layer = layers > 1 and "enc.blk.1.attn_rel_b.weight" in finder.tensors
    gated = "enc.blk.0.ffn_gate.weight" in finder.tensors
    model_type = "umt5" if every_layer else "t5"
    epsilon = metadata.get(".attention.layer_norm_epsilon", float, 1e-6)
    config = {
        "model_type": model_type,
        "architectures": [f"{model_type.upper()}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": finder.shape(GGUF_EMBEDDING)[0],
        "d_model": metadata.get(".embedding_length", int),
        "d_kv": metadata.get(".attention.key_length", int),
        "d_ff": metadata.get(".feed_forward_length", int),
        "num_layers": layers,
        "num_decoder_layers": decoder_layers,
        "num_heads": metadata.get(".attention.head_count", int),
        "relative_attention_num_buckets": metadata.get(".attention.relative_buckets_count", int),
        # llama.cpp uses these values for all models.
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "layer_norm_epsilon": metadata.get(".attention.layer_norm_rms_epsilon", float, epsilon),
        "decoder_start_token_id": metadata.get(".decoder_start_token_id", int, 0),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", int, 0),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id", int, 1),
        "tie_word_embeddings": not own_head,
        "scale_decoder_outputs": not own_head,
    }
    # The map has both names of the first matrix in a feed-forward layer. Old checkpoints have a
    # bias between encoder and decoder, which is not needed.
    left_out = (".wi" if gated else ".wi_1", "EncDecAttention.relative_attention_bias")
    stems = ("shared", "encoder.", "decoder.", *(("lm_head",) if own_head else ()))
    names = _name_map(metadata.architecture, max(layers, decoder_layers)).mapping
    for hf_name, (_, gguf_name) in names.items():
        name = f"{gguf_name}.weight"
        wanted = hf_name.startswith(stems) and not hf_name.endswith((*left_out, ".linear"))
        if wanted and name in finder.tensors:
            shape = finder.shape(name)
            is_matrix = len(shape) > 1 and "relative_attention_bias" not in hf_name
            finder.take(f"{hf_name}.weight", name, shape, is_matrix=is_matrix)
    unused = [f"dec.blk.{number}.cross_attn_rel_b.weight" for number in range(decoder_layers)]
    finder.check_left(model_type, GGUF_HEAD, *unused)
    return config


def _has_own_head(finder: Finder) -> bool:
    """Return whether there is a head that is not a copy of the embedding."""
    if GGUF_HEAD not in finder.tensors:
        return False
    head, embedding = (finder.read(name, _SAMPLED_ROWS) for name in (GGUF_HEAD, GGUF_EMBEDDING))
    with np.errstate(all="ignore"):
        lengths = float(np.linalg.norm(head)) * float(np.linalg.norm(embedding))
        return not float((head * embedding).sum()) > _SAME_DIRECTION * lengths
