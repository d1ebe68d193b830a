"""Reader of Llama models in Meta's layout. params.json becomes config.json. Tensors of the parts
consolidated.NN.pth are joined, and get Hugging Face's names and order of rows."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from .. import shards
from ..disk import read_json
from ..tensors import LARGEST_EXTENT, Contents, Malformed, TensorInfo, TensorReader, naming, same
from .torch import TorchFile
from .vocabularies import MODEL, read_tokenizer

PARAMS = "params.json"
_KNOWN = (
    "dim n_layers n_heads n_kv_heads head_dim hidden_dim vocab_size multiple_of ffn_dim_multiplier "
    "norm_eps rope_theta use_scaled_rope rope_scaling_factor max_seq_len max_batch_size "
    "model_parallel_size"
)
_SCALED_BY = 8.0
# Factor of the rotary scaling by (width, layers). Llama 3.2's text models have another factor than
# 3.1's, which is in Hugging Face's config.json but not in params.json.
_STRETCHED = {(2048, 16): 32.0, (3072, 28): 32.0}
_TRAINED = 8192
"""Context length in training before the rotary scaling of Llama 3.1."""
_LENGTHS = {10_000.0: 4096, 1_000_000.0: 16384, 500_000.0: 8192}
_FIRST_LLAMA = 2048
"""Context lengths: by the base of the rotary positions, and of Llama 1."""


def read_params(file: Path) -> dict[str, Any]:
    """Return config.json of the model, without entries that depend on the weights. Raises
    CheckpointError for an unknown key, because it may change the output of the model."""
    if not file.is_file():
        raise CheckpointError(f"{file.parent} lacks {file.name}: download it again")
    params = {key: value for key, value in read_json(file).items() if value is not None}
    unknown = sorted(key for key in params.keys() - {*_KNOWN.split()} if params[key] is not False)
    if unknown:
        raise CheckpointError(f"{file} asks for {unknown[0]!a:.60}, which is not supported here")
    with naming(file):
        return _config(params)


def _config(params: Mapping[str, Any]) -> dict[str, Any]:
    width, heads, layers = (_whole(params, key) for key in ("dim", "n_heads", "n_layers"))
    key_heads = _whole(params, "n_kv_heads", heads)
    if heads % key_heads:
        raise Malformed(f"asks for {heads} heads that share {key_heads} keys")
    head_width = _whole(params, "head_dim", width // heads)
    epsilon, theta = _number(params, "norm_eps", 1e-5), _number(params, "rope_theta", 10_000.0)
    scaled = params.get("use_scaled_rope", False)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": _inner(params, width),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_width,
        "max_position_embeddings": _length(params, epsilon, theta, scaled=scaled),
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
    }
    if params.get("vocab_size", -1) != -1:
        config["vocab_size"] = _whole(params, "vocab_size")
    if scaled:
        usual = _STRETCHED.get((width, layers), _SCALED_BY)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": _number(params, "rope_scaling_factor", usual),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": _TRAINED,
        }
    return config


def _inner(params: Mapping[str, Any], width: int) -> int:
    """Return the width of feed-forward layers: 8/3 of the model's width, times a factor, rounded up
    to a multiple."""
    if "hidden_dim" in params:
        return _whole(params, "hidden_dim")
    multiple = _whole(params, "multiple_of", 256)
    inner = int(8 * width // 3 * _number(params, "ffn_dim_multiplier", 1.0))
    return -(-inner // multiple) * multiple


def _length(params: Mapping[str, Any], epsilon: float, theta: float, *, scaled: bool) -> int:
    """Return the context length of the model. Each generation of Llama has another base of the
    rotary positions, and the first two differ in epsilon."""
    first = theta == 10_000.0 and epsilon <= 1e-6
    usual = _FIRST_LLAMA if first else _LENGTHS.get(theta, min(_LENGTHS.values()))
    return _whole(params, "max_seq_len", 16 * _TRAINED if scaled else usual)


def _whole(params: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = params.get(key, default)
    if type(value) is not int or not 1 <= value <= LARGEST_EXTENT:
        raise Malformed(f"needs {key}, a whole number above 0, not {value!a:.40}")
    return value


def _number(params: Mapping[str, Any], key: str, default: float) -> float:
    value = params.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= 1e12:
        raise Malformed(f"needs {key}, a number above 0, not {value!a:.40}")
    return float(value)


EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"


@dataclass(frozen=True)
class Entry:
    """A tensor in Meta's files, with the shape after joining. heads: The number of rotary heads in
    the rows, 0 for none. axis: The axis along which the parts are joined; None if every part has
    the whole tensor."""

    meta_name: str
    shape: tuple[int, ...]
    heads: int = 0
    axis: int | None = None


def entries(config: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the tensors of the model that a config.json describes, by Hugging Face's name."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries, keys = heads * config["head_dim"], key_heads * config["head_dim"]
    table = (config["vocab_size"], width)
    named = {"model.embed_tokens.weight": Entry(EMBEDDING, table)}
    for layer in range(config["num_hidden_layers"]):
        for hf_name, meta_name, shape, rotated in (
            ("input_layernorm", "attention_norm", (width,), 0),
            ("self_attn.q_proj", "attention.wq", (queries, width), heads),
            ("self_attn.k_proj", "attention.wk", (keys, width), key_heads),
            ("self_attn.v_proj", "attention.wv", (keys, width), 0),
            ("self_attn.o_proj", "attention.wo", (width, queries), 0),
            ("post_attention_layernorm", "ffn_norm", (width,), 0),
            ("mlp.gate_proj", "feed_forward.w1", (inner, width), 0),
            ("mlp.down_proj", "feed_forward.w2", (width, inner), 0),
            ("mlp.up_proj", "feed_forward.w3", (inner, width), 0),
        ):
            entry = Entry(f"layers.{layer}.{meta_name}.weight", shape, rotated)
            named[f"model.layers.{layer}.{hf_name}.weight"] = entry
    named["model.norm.weight"] = Entry("norm.weight", (width,))
    named["lm_head.weight"] = Entry(HEAD, table)
    return named


def rotary_rows(begin: int, end: int, head_width: int) -> np.ndarray[Any, Any]:
    """Return the positions of rows begin .. end - 1 of Hugging Face's order in Meta's order. Meta
    and llama.cpp rotate rows 2i and 2i + 1 of a head together. Hugging Face rotates row i of the
    first half with row i of the second half."""
    rows = np.arange(begin, end)
    head, inside = np.divmod(rows, head_width)
    half, pair = np.divmod(inside, head_width // 2)
    return head * head_width + 2 * pair + half


_PART = re.compile(r"consolidated\.(\d{2,4})\.pth")
_FLOATING = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DROPPED = re.compile(r"rope\.freqs|.*\.inner_attention\.rope\.freqs")
"""Names of tables that can be computed from params.json."""


class MetaFile(TensorReader):
    """The joined tensors of a model, without a head that repeats the embedding. config: The
    config.json of the model."""

    def __init__(self, file: Path) -> None:
        """Open the model whose first part is `file`, next to the other parts and params.json."""
        self.paths = tuple(parts_of(file))
        self._directory = file.parent
        self._parts = [TorchFile(path) for path in self.paths]
        self._first = self._parts[0].infos
        config = read_params(self._directory / PARAMS)
        config["vocab_size"] = self._vocabulary(config.get("vocab_size"))
        expected = entries(config)
        if HEAD not in self._first:
            del expected["lm_head.weight"]
        self._entries = {hf_name: self._as_cut(entry) for hf_name, entry in expected.items()}
        names = {entry.meta_name for entry in self._entries.values()}
        for path, part in zip(self.paths, self._parts, strict=True):
            extra = sorted(n for n in part.infos.keys() - names if not _DROPPED.fullmatch(n))
            if extra:
                raise CheckpointError(f"{path} holds {extra[0]!a:.200}, unlike {PARAMS}")
        self.infos = infos = {
            hf_name: self._info(entry) for hf_name, entry in self._entries.items()
        }
        tied = HEAD not in self._first or same(
            self.tensor("lm_head.weight"), self.tensor("model.embed_tokens.weight")
        )
        if tied:
            infos.pop("lm_head.weight", None)
        stored = _FLOATING[infos["model.embed_tokens.weight"].dtype]
        self.config = {**config, "tie_word_embeddings": tied, "torch_dtype": stored}

    @property
    def contents(self) -> Contents:
        stored = {entry.meta_name: self._info(entry) for entry in self._entries.values()}
        parts = {name: info for part in self._parts for name, info in part.infos.items()}
        tables = {name: info for name, info in parts.items() if _DROPPED.fullmatch(name)}
        tied = HEAD in stored and "lm_head.weight" not in self.infos
        return Contents(
            {**stored, **tables},
            {hf_name: self._entries[hf_name].meta_name for hf_name in self.infos},
            {HEAD: EMBEDDING} if tied else {},
            dict.fromkeys(tables, f"it follows from {PARAMS}"),
        )

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        entry = self._entries[name]
        if not entry.heads:
            return self._joined(entry, begin, end)
        width = entry.shape[0] // entry.heads
        first, last = begin // width * width, -(-end // width) * width
        places = mx.array(rotary_rows(begin, end, width) - first)
        return self._joined(entry, first, last)[places]

    def _joined(self, entry: Entry, begin: int, end: int) -> mx.array:
        if entry.axis is None:
            return self._parts[0].rows(entry.meta_name, begin, end)
        extent = entry.shape[0] // len(self._parts)
        pieces = []
        for number, part in enumerate(self._parts):
            low, high = begin, end
            if entry.axis == 0:
                low, high = max(begin - number * extent, 0), min(end - number * extent, extent)
            if low < high:
                pieces.append(part.rows(entry.meta_name, low, high))
        return mx.concatenate(pieces, axis=entry.axis)

    def _vocabulary(self, stated: int | None) -> int:
        """Return the number of tokens: the rows of the head in all parts, or of the embedding if
        there is no head. stated: The number in params.json."""
        name = HEAD if HEAD in self._first else EMBEDDING
        info = self._first.get(name)
        if info is None or len(info.shape) != 2:
            raise CheckpointError(f"{self.paths[0]} lacks {EMBEDDING}, or its {name} is no matrix")
        tokens = info.shape[0] * len(self._parts)
        if not tokens or stated not in (None, tokens):
            raise CheckpointError(
                f"{self._directory / PARAMS} asks for {stated} tokens where the weights "
                f"have {tokens}"
            )
        return tokens

    def _as_cut(self, entry: Entry) -> Entry:
        """Return the entry with the axis along which its parts are joined."""
        infos = [part.infos.get(entry.meta_name) for part in self._parts]
        for path, info in zip(self.paths, infos, strict=True):
            if info is None:
                raise CheckpointError(f"{path} lacks {entry.meta_name}: download it again")
            if info.dtype not in _FLOATING or info.dtype != self._first[entry.meta_name].dtype:
                raise CheckpointError(f"{path} stores {entry.meta_name} as {info.dtype}")
        shapes = {info.shape for info in infos if info is not None}
        if shapes == {entry.shape} and (len(infos) == 1 or len(entry.shape) == 1):
            return entry
        # Before Llama 3, the embedding was split along the columns.
        for axis, extent in enumerate(entry.shape):
            part, rest = divmod(extent, len(infos))
            if not rest and shapes == {(*entry.shape[:axis], part, *entry.shape[axis + 1 :])}:
                return replace(entry, axis=axis)
        different = " and ".join(map(str, sorted(shapes)[:3]))
        raise CheckpointError(
            f"{self._directory}: {entry.meta_name} has shape {different} in each of {len(infos)} "
            f"parts where {PARAMS} asks for {entry.shape} in all: a part may be missing"
        )

    def _info(self, entry: Entry) -> TensorInfo:
        return TensorInfo.of(self._first[entry.meta_name].dtype, entry.shape)


def parts_of(file: Path) -> list[Path]:
    """Return all parts of the model to which `file` belongs, in order. Raises CheckpointError."""
    names = ((path, _PART.fullmatch(path.name)) for path in file.parent.iterdir())
    parts = {int(match[1]): path for path, match in names if match is not None}
    for number in range(max(parts)):
        if number not in parts:
            name = f"consolidated.{number:02d}.pth"
            raise CheckpointError(f"{file.parent} lacks {name}: download it again")
    return [parts[number] for number in sorted(parts)]


def lay_down(source: Path, directory: Path) -> None:
    """Write config.json and tokenizer files into `directory`, and links to the parts."""
    parts = parts_of(source / "consolidated.00.pth")
    config = dict(MetaFile(parts[0]).config)
    for file in (*parts, source / PARAMS):
        (directory / file.name).symlink_to(file.absolute())
    # The first Llama has one tokenizer next to the directories of the models.
    places = (source / MODEL, source.absolute().parent / MODEL)
    tokenizer = next((shards.inside(file) for file in places if file.is_file()), None)
    if tokenizer is not None:
        scaled = "rope_scaling" in config
        made, ids = read_tokenizer(tokenizer, config["vocab_size"], since_31=scaled)
        config.update(ids)
        for name, content in made.items():
            (directory / name).write_text(content, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
