"""Every decoder-only family gives of a GGUF file the log-probabilities of the same weights in
mlx-lm's layout.

The files have the layout of llama.cpp's converter. The gguf package gives names and keys. This
module makes the converter's changes of tensors: the order of rotary rows, and 1 + w in norms.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.tensor_mapping import get_tensor_name_map
from mlx.utils import tree_flatten, tree_map

from mlx_specdec import load

from ..support.gguf_files import Gguf
from ..support.tiny import from_config
from .scores import letters, scores
from .support import command, quick

_DATA = json.loads(Path(__file__).with_name("gguf_families.json").read_text())
SIZES: dict[str, Any] = _DATA["sizes"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = _DATA["cases"]
"""A case -> the architecture in GGUF, mlx-lm's type, and entries of config.json besides SIZES."""
PERMUTED = {"llama", "granite", "smollm3"}
SHIFTED = {"gemma", "gemma2", "gemma3", "nemotron"}
STATED: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "num_hidden_layers": gguf.GGUFWriter.add_block_count,
    "hidden_size": gguf.GGUFWriter.add_embedding_length,
    "intermediate_size": gguf.GGUFWriter.add_feed_forward_length,
    "num_attention_heads": gguf.GGUFWriter.add_head_count,
    "num_key_value_heads": gguf.GGUFWriter.add_head_count_kv,
    "max_position_embeddings": gguf.GGUFWriter.add_context_length,
    "rope_theta": gguf.GGUFWriter.add_rope_freq_base,
    "rms_norm_eps": gguf.GGUFWriter.add_layer_norm_rms_eps,
    "layer_norm_eps": gguf.GGUFWriter.add_layer_norm_eps,
    "norm_epsilon": gguf.GGUFWriter.add_layer_norm_eps,
    "norm_eps": gguf.GGUFWriter.add_layer_norm_eps,
    "num_experts": gguf.GGUFWriter.add_expert_count,
    "num_local_experts": gguf.GGUFWriter.add_expert_count,
    "num_experts_per_tok": gguf.GGUFWriter.add_expert_used_count,
    "moe_intermediate_size": gguf.GGUFWriter.add_expert_feed_forward_length,
    "shared_expert_intermediate_size": gguf.GGUFWriter.add_expert_shared_feed_forward_length,
    "logit_scale": gguf.GGUFWriter.add_logit_scale,
    "logits_scaling": gguf.GGUFWriter.add_logit_scale,
    "attention_multiplier": gguf.GGUFWriter.add_attention_scale,
    "embedding_multiplier": gguf.GGUFWriter.add_embedding_scale,
    "residual_multiplier": gguf.GGUFWriter.add_residual_scale,
    "attn_logit_softcapping": gguf.GGUFWriter.add_attn_logit_softcapping,
    "final_logit_softcapping": gguf.GGUFWriter.add_final_logit_softcapping,
    "sliding_window": gguf.GGUFWriter.add_sliding_window,
    "use_parallel_residual": gguf.GGUFWriter.add_parallel_residual,
}


def random(config: dict[str, Any]) -> Any:
    """Return mlx-lm's model with random weights, under which every vector matters."""
    model = from_config(config)
    mx.random.seed(7)
    model.update(
        tree_map(lambda array: mx.random.normal(array.shape) * 0.3 + 0.1, model.parameters())
    )
    if hasattr(model, "sanitize"):
        model.sanitize({})
    return model


def write(file: Path, architecture: str, config: dict[str, Any], model: Any) -> None:
    """The model as llama.cpp's converter would write it."""
    writer = gguf.GGUFWriter(str(file), architecture)
    for key in STATED.keys() & config.keys():
        STATED[key](writer, config[key])
    width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_dimension_count(int(width * config.get("partial_rotary_factor", 1)))
    if "head_dim" in config:
        writer.add_key_length(width)
        writer.add_value_length(width)
    if "rope_scaling" in config:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_tokenizer_model("none")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(numbers[architecture], config["num_hidden_layers"])
    experts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, array in tree_flatten(model.parameters()):
        values = np.array(array.astype(mx.float32) if array.ndim == 1 else array)
        path, _, kind = name.replace("switch_mlp", "experts").rpartition(".")
        if "block_sparse_moe.experts" in path:
            path = path.replace(path.split(".")[-1], experts[path.split(".")[-1]])
        if architecture in PERMUTED and path.endswith(("q_proj", "k_proj")):
            rows = (values.shape[0] // width, 2, width // 2, *values.shape[1:])
            values = values.reshape(rows).swapaxes(1, 2).reshape(values.shape)
        gguf_name = f"{names.get_name(path)}.{kind}"
        if architecture in SHIFTED and gguf_name.endswith("norm.weight"):
            values = values + 1
        if gguf_name.endswith("ffn_gate_inp_shexp.weight"):
            values = values.reshape(-1)  # older converters leave out axes of 1
        writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


QUICK = ("cohere2", "gemma3", "granite", "llama", "mixtral", "nemotron", "phi3", "qwen2moe")


@pytest.mark.parametrize("case", quick(CASES, *QUICK))
def test_log_probabilities_are_those_of_the_same_weights(case: str, tmp_path: Path) -> None:
    architecture, model_type, changes = CASES[case]
    stated = any(key.endswith(("norm_eps", "epsilon")) for key in changes)
    epsilon = {} if stated else {"rms_norm_eps": 1e-4}
    config = {**SIZES, **epsilon, **changes, "model_type": model_type}
    made, model = letters(tmp_path / "gguf", 96), random(config)
    write(made / "m.gguf", architecture, config, model)
    tokens = [number * 7 % 96 for number in range(14)]
    logits = model(mx.array([tokens]))[0]
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    found = scores(load(made, dtype="float32"), tokens, None, 96)
    assert expected.std() > 0.01
    assert np.abs(found - expected).max() < 1e-4 * max(1, np.abs(expected).max())


def test_every_family_is_tried(tmp_path: Path) -> None:
    """The error about an unknown family lists those that are read."""
    Gguf("mamba").write(tmp_path / "m.gguf")
    done = command("convert", "--model", tmp_path / "m.gguf", "--mlx-path", tmp_path / "out")
    done.refuses("architecture 'mamba'")
    listed = done.err.split("of GGUF files ")[1].removesuffix(" are read\n").split(", ")
    assert {*listed} == {"t5", *(architecture for architecture, _, _ in CASES.values())}
