"""Llama as Meta publishes it: params.json as config.json, and the tensors of the parts,
consolidated.NN.pth, joined and in Hugging Face's order."""

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
MOST_LAYERS = 10_000
_KNOWN = (
    "dim n_layers n_heads n_kv_heads head_dim hidden_dim vocab_size multiple_of ffn_dim_multiplier "
    "norm_eps rope_theta use_scaled_rope rope_scaling_factor max_seq_len max_batch_size "
    "model_parallel_size"
)
_SCALED_BY = 8.0
# Meta's params.json does not say that Llama 3.2's text models, (width, layers), are stretched
# further than 3.1's; Hugging Face's config.json of the same models does.
_STRETCHED = {(2048, 16): 32.0, (3072, 28): 32.0}
_TRAINED = 8192
_LENGTHS = {10_000.0: 4096, 1_000_000.0: 16384, 500_000.0: 8192}
_FIRST_LLAMA = 2048


def read_params(file: Path) -> dict[str, Any]:
    """config.json of the model, without what only the weights say. Raises CheckpointError for what
    is not known here, since it may change what the model computes."""
    if not file.is_file():
        raise CheckpointError(f"{file.parent} lacks {file.name}: download it again")
    given = {key: value for key, value in read_json(file).items() if value is not None}
    unknown = sorted(key for key in given.keys() - {*_KNOWN.split()} if given[key] is not False)
    if unknown:
        raise CheckpointError(f"{file} asks for {unknown[0]!a:.60}, which is not supported here")
    with naming(file):
        return _config(given)


def _config(given: Mapping[str, Any]) -> dict[str, Any]:
    width, heads, layers = (_whole(given, key) for key in ("dim", "n_heads", "n_layers"))
    key_heads = _whole(given, "n_kv_heads", heads)
    if heads % key_heads:
        raise Malformed(f"asks for {heads} heads that share {key_heads} keys")
    head_width = _whole(given, "head_dim", width // heads)
    if head_width % 2:
        raise Malformed(f"asks for heads of width {head_width}, which cannot be rotated")
    if layers > MOST_LAYERS:
        raise Malformed(f"asks for {layers} layers")
    epsilon, theta = _number(given, "norm_eps", 1e-5), _number(given, "rope_theta", 10_000.0)
    scaled = given.get("use_scaled_rope", False)
    if type(scaled) is not bool:
        raise Malformed("asks for use_scaled_rope that is neither true nor false")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": _inner(given, width),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_width,
        "max_position_embeddings": _length(given, epsilon, theta, scaled=scaled),
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
    }
    if given.get("vocab_size", -1) != -1:
        config["vocab_size"] = _whole(given, "vocab_size")
    if scaled:
        usual = _STRETCHED.get((width, layers), _SCALED_BY)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": _number(given, "rope_scaling_factor", usual),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": _TRAINED,
        }
    return config


def _inner(given: Mapping[str, Any], width: int) -> int:
    """Two thirds of four widths, times a factor, rounded up to a multiple."""
    if "hidden_dim" in given:
        return _whole(given, "hidden_dim")
    multiple = _whole(given, "multiple_of", 256)
    inner = int(8 * width // 3 * _number(given, "ffn_dim_multiplier", 1.0))
    inner = -(-inner // multiple) * multiple
    if not 1 <= inner <= LARGEST_EXTENT:
        raise Malformed(f"asks for inner {inner}")
    return inner


def _length(given: Mapping[str, Any], epsilon: float, theta: float, *, scaled: bool) -> int:
    """Positions that the model was trained for: each generation has another base of the rotation,
    and the first two differ in epsilon."""
    first = theta == 10_000.0 and epsilon <= 1e-6
    usual = _FIRST_LLAMA if first else _LENGTHS.get(theta, min(_LENGTHS.values()))
    return _whole(given, "max_seq_len", 16 * _TRAINED if scaled else usual)


def _whole(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = given.get(key, default)
    if type(value) is not int or not 1 <= value <= LARGEST_EXTENT:
        raise Malformed(f"needs {key}, a whole number above 0, not {value!a:.40}")
    return value


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= 1e12:
        raise Malformed(f"needs {key}, a number above 0, not {value!a:.40}")
    return float(value)


EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"


@dataclass(frozen=True)
class Entry:
    """One tensor. theirs: Meta's name. heads: how many rotated heads its rows are of, 0 for none.
    axis: along which the parts are joined, None where each has the whole."""

    theirs: str
    shape: tuple[int, ...]
    heads: int = 0
    axis: int | None = None


def entries(config: Mapping[str, Any]) -> dict[str, Entry]:
    """Every tensor by Hugging Face's name, for a config.json."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries, keys = heads * config["head_dim"], key_heads * config["head_dim"]
    whole = (config["vocab_size"], width)
    named = {"model.embed_tokens.weight": Entry(EMBEDDING, whole)}
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs, shape, rotated in (
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
            entry = Entry(f"layers.{layer}.{theirs}.weight", shape, rotated)
            named[f"model.layers.{layer}.{ours}.weight"] = entry
    named["model.norm.weight"] = Entry("norm.weight", (width,))
    named["lm_head.weight"] = Entry(HEAD, whole)
    return named


def rotary_rows(begin: int, end: int, head_width: int) -> np.ndarray[Any, Any]:
    """Where rows begin .. end - 1 of Hugging Face's order lie in Meta's and llama.cpp's, in which
    rows 2i and 2i + 1 of a head are rotated together, not its halves."""
    rows = np.arange(begin, end)
    head, inside = np.divmod(rows, head_width)
    half, pair = np.divmod(inside, head_width // 2)
    return head * head_width + 2 * pair + half


_PART = re.compile(r"consolidated\.(\d{2,4})\.pth")
_FLOATING = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DROPPED = re.compile(r"rope\.freqs|.*\.inner_attention\.rope\.freqs")
"""Tables that follow from params.json."""


class MetaFile(TensorReader):
    """The tensors of one model, joined, without a head that repeats the embedding. file: the first
    part, next to the others and params.json. config: what config.json would say."""

    def __init__(self, file: Path) -> None:
        self.paths = tuple(parts_of(file))
        self._directory = file.parent
        self._parts = [TorchFile(path) for path in self.paths]
        self._first = self._parts[0].infos
        config = read_params(self._directory / PARAMS)
        config["vocab_size"] = self._vocabulary(config.get("vocab_size"))
        expected = entries(config)
        if HEAD not in self._first:
            del expected["lm_head.weight"]
        self._entries = {ours: self._as_cut(entry) for ours, entry in expected.items()}
        known = {entry.theirs for entry in self._entries.values()}
        for path, part in zip(self.paths, self._parts, strict=True):
            extra = sorted(n for n in part.infos.keys() - known if not _DROPPED.fullmatch(n))
            if extra:
                raise CheckpointError(f"{path} holds {extra[0]!a:.200}, unlike {PARAMS}")
        self.infos = infos = {ours: self._info(entry) for ours, entry in self._entries.items()}
        tied = HEAD not in self._first or same(
            self.tensor("lm_head.weight"), self.tensor("model.embed_tokens.weight")
        )
        if tied:
            infos.pop("lm_head.weight", None)
        stored = _FLOATING[infos["model.embed_tokens.weight"].dtype]
        self.config = {**config, "tie_word_embeddings": tied, "torch_dtype": stored}

    @property
    def contents(self) -> Contents:
        stored = {entry.theirs: self._info(entry) for entry in self._entries.values()}
        parts = {name: info for part in self._parts for name, info in part.infos.items()}
        tables = {name: info for name, info in parts.items() if _DROPPED.fullmatch(name)}
        tied = HEAD in stored and "lm_head.weight" not in self.infos
        return Contents(
            {**stored, **tables},
            {ours: self._entries[ours].theirs for ours in self.infos},
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
            return self._parts[0].rows(entry.theirs, begin, end)
        each = entry.shape[0] // len(self._parts)
        pieces = []
        for number, part in enumerate(self._parts):
            low, high = begin, end
            if entry.axis == 0:
                low, high = max(begin - number * each, 0), min(end - number * each, each)
            if low < high:
                pieces.append(part.rows(entry.theirs, low, high))
        return mx.concatenate(pieces, axis=entry.axis)

    def _vocabulary(self, said: int | None) -> int:
        """The number of tokens, along which the parts of the head are cut, or without one those of
        the embedding. said: by params.json."""
        name = HEAD if HEAD in self._first else EMBEDDING
        info = self._first.get(name)
        if info is None or len(info.shape) != 2:
            raise CheckpointError(f"{self.paths[0]} lacks {EMBEDDING}, or its {name} is no matrix")
        tokens = info.shape[0] * len(self._parts)
        if not tokens or said not in (None, tokens):
            raise CheckpointError(
                f"{self._directory / PARAMS} asks for {said} tokens where the weights have {tokens}"
            )
        return tokens

    def _as_cut(self, entry: Entry) -> Entry:
        """The same, with the axis along which its parts make one."""
        infos = [part.infos.get(entry.theirs) for part in self._parts]
        for path, info in zip(self.paths, infos, strict=True):
            if info is None:
                raise CheckpointError(f"{path} lacks {entry.theirs}: download it again")
            if info.dtype not in _FLOATING or info.dtype != self._first[entry.theirs].dtype:
                raise CheckpointError(f"{path} stores {entry.theirs} as {info.dtype}")
        shapes = {info.shape for info in infos if info is not None}
        if shapes == {entry.shape} and (len(infos) == 1 or len(entry.shape) == 1):
            return entry
        # Before Llama 3 each part had some columns of every token's embedding.
        for axis, extent in enumerate(entry.shape):
            part, rest = divmod(extent, len(infos))
            if not rest and shapes == {(*entry.shape[:axis], part, *entry.shape[axis + 1 :])}:
                return replace(entry, axis=axis)
        different = " and ".join(map(str, sorted(shapes)[:3]))
        raise CheckpointError(
            f"{self._directory}: {entry.theirs} has shape {different} in each of {len(infos)} "
            f"parts where {PARAMS} asks for {entry.shape} in all: a part may be missing"
        )

    def _info(self, entry: Entry) -> TensorInfo:
        return TensorInfo.of(self._first[entry.theirs].dtype, entry.shape)


def parts_of(file: Path) -> list[Path]:
    """All parts of a model in order, whichever of them is given. Raises CheckpointError."""
    names = ((path, _PART.fullmatch(path.name)) for path in file.parent.iterdir())
    parts = {int(match[1]): path for path, match in names if match is not None}
    if not parts:
        raise CheckpointError(f"{file} is not called consolidated.NN.pth: Meta's parts are")
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
    # The first Llama came with one tokenizer next to the folders of its sizes.
    places = (source / MODEL, source.absolute().parent / MODEL)
    tokenizer = next((shards.inside(file) for file in places if file.is_file()), None)
    if tokenizer is not None:
        scaled = "rope_scaling" in config
        made, ids = read_tokenizer(tokenizer, config["vocab_size"], since_31=scaled)
        config.update(ids)
        for name, content in made.items():
            (directory / name).write_text(content, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
