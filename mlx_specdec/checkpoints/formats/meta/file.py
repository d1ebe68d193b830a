"""Meta's consolidated.NN.pth, one or several parts, as a set of tensors under Hugging Face's names.

Parts are joined and rotary rows put in order as rows are asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ....errors import CheckpointError
from ... import shards
from ...tensors import Contents, Reader, TensorInfo, same
from ..torch.file import TorchFile
from .params import EMBEDDING, HEAD, PARAMS, Entry, entries, read_params, rotary_rows
from .text import MODEL, read_tokenizer

_PART = re.compile(r"consolidated\.(\d{2,4})\.pth")
_QUERIES = "layers.0.attention.wq.weight"
_FLOATING = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DROPPED = re.compile(r"rope\.freqs|.*\.inner_attention\.rope\.freqs")
"""Tables that follow from params.json."""


class MetaFile(Reader):
    """The tensors of one model, joined; a head that repeats the embedding is left out. config: what
    config.json would say."""

    def __init__(self, file: Path) -> None:
        """file: the first part, the others and params.json beside it."""
        self.paths = tuple(parts_of(file))
        self._directory = file.parent
        self._parts = [TorchFile(path) for path in self.paths]
        self._first = self._parts[0].infos
        config = read_params(self._directory / PARAMS)
        self._check_count(config)
        config["vocab_size"] = self._vocabulary(config.get("vocab_size"))
        layers, most = config["num_hidden_layers"], len(self._first)
        if layers > most:
            raise CheckpointError(
                f"{self._directory / PARAMS} asks for {layers} layers, and {file.name} has {most} "
                "tensors"
            )
        asked = entries(config)
        if HEAD not in self._first:
            del asked["lm_head.weight"]
        self._entries = {ours: self._as_cut(entry) for ours, entry in asked.items()}
        self._check_extra()
        self._check_copies()
        infos = {ours: self._info(entry) for ours, entry in self._entries.items()}
        self.infos = infos
        tied = HEAD not in self._first or same(
            self.tensor("lm_head.weight"), self.tensor("model.embed_tokens.weight")
        )
        if tied:
            infos.pop("lm_head.weight", None)
        stored = _FLOATING[infos["model.embed_tokens.weight"].dtype]
        self.config: Mapping[str, Any] = {
            **config,
            "tie_word_embeddings": tied,
            "torch_dtype": stored,
        }

    @property
    def contents(self) -> Contents:
        """What the parts hold under Meta's names, joined."""
        stored = {entry.theirs: self._info(entry) for entry in self._entries.values()}
        tables = {
            name: info
            for part in self._parts
            for name, info in part.infos.items()
            if _DROPPED.fullmatch(name)
        }
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
        if entry.axis == 1:
            pieces = [part.rows(entry.theirs, begin, end) for part in self._parts]
            return mx.concatenate(pieces, axis=1)
        each = entry.shape[0] // len(self._parts)
        pieces = []
        for number in range(begin // each, -(-end // each)):
            low, high = max(begin - number * each, 0), min(end - number * each, each)
            pieces.append(self._parts[number].rows(entry.theirs, low, high))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=0)

    def _check_count(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError where the last parts are missing: the first tensor tells."""
        info, queries = self._first.get(_QUERIES), config["num_attention_heads"]
        queries *= config["head_dim"]
        count, rows = len(self._parts), info.shape[0] if info is not None and info.shape else 0
        if rows and queries % rows == 0 and queries // rows > count:
            raise CheckpointError(
                f"{self._directory} has {count} of the {queries // rows} parts that "
                f"{PARAMS} asks for: the rest is missing, or that file is another model's"
            )

    def _vocabulary(self, asked: int | None) -> int:
        """Tokens: the head is cut along them by every generation, the embedding only since the
        third, where a part of it then has as many rows as one of the head. asked: by params.json.
        """
        path = self.paths[0]
        name = next((name for name in (HEAD, EMBEDDING) if name in self._first), None)
        if name is None:
            raise CheckpointError(f"{path} lacks {EMBEDDING}: it is not a Llama of Meta's")
        shape = self._first[name].shape
        if len(shape) != 2 or not shape[0]:
            raise CheckpointError(f"{path} has {name} of shape {shape}")
        tokens = shape[0] * len(self._parts)
        if asked not in (None, tokens):
            raise CheckpointError(
                f"{self._directory / PARAMS} asks for {asked} tokens where the weights have "
                f"{tokens}"
            )
        return tokens

    def _as_cut(self, entry: Entry) -> Entry:
        """The same, with the axis along which its parts make one."""
        shapes, dtype = [], None
        for path, part in zip(self.paths, self._parts, strict=True):
            info = part.infos.get(entry.theirs)
            if info is None:
                raise CheckpointError(f"{path} lacks {entry.theirs}: download it again")
            dtype = dtype or info.dtype
            if info.dtype not in _FLOATING or info.dtype != dtype:
                raise CheckpointError(f"{path} stores {entry.theirs} as {info.dtype}")
            shapes.append(info.shape)
        # Before Llama 3 each part had some columns of every token's embedding.
        for axis in (entry.axis, 1) if entry.theirs == EMBEDDING else (entry.axis,):
            each = list(entry.shape)
            if axis is not None:
                each[axis], rest = divmod(each[axis], len(shapes))
            if {*shapes} == {tuple(each)} and (axis is None or not rest):
                return replace(entry, axis=axis)
        different = " and ".join(map(str, sorted(set(shapes))[:3]))
        parts = "" if len(shapes) == 1 else f" in each of {len(shapes)} parts"
        raise CheckpointError(
            f"{self._directory}: {entry.theirs} has shape {different}{parts} where {PARAMS} asks "
            f"for {entry.shape} in all"
        )

    def _check_extra(self) -> None:
        known = {entry.theirs for entry in self._entries.values()}
        for path, part in zip(self.paths, self._parts, strict=True):
            extra = sorted(n for n in part.infos.keys() - known if not _DROPPED.fullmatch(n))
            if extra:
                raise CheckpointError(
                    f"{path} holds {extra[0]!a:.200}, which {PARAMS} does not ask for"
                )

    def _check_copies(self) -> None:
        """What each part has whole has to be the same in all."""
        for entry in self._entries.values():
            if entry.axis is None:
                first, *rest = (part.tensor(entry.theirs) for part in self._parts)
                if not all(same(first, other) for other in rest):
                    raise CheckpointError(
                        f"{self._directory} holds parts of different models: their "
                        f"{entry.theirs} differ"
                    )

    def _info(self, entry: Entry) -> TensorInfo:
        return TensorInfo.of(self._first[entry.theirs].dtype, entry.shape)


def parts_of(file: Path) -> list[Path]:
    """All parts of a model in order, whichever of them is given. Raises CheckpointError."""
    parts = {
        int(name[1]): path
        for path in file.parent.iterdir()
        if (name := _PART.fullmatch(path.name)) is not None
    }
    if not parts:
        raise CheckpointError(f"{file} is not called consolidated.NN.pth: Meta's parts are")
    for number in range(max(parts)):
        if number not in parts:
            raise CheckpointError(
                f"{file.parent} lacks consolidated.{number:02d}.pth: download the model again"
            )
    return [parts[number] for number in sorted(parts)]


def lay_down(source: Path, directory: Path) -> None:
    """Write config.json and tokenizer files into `directory`, and links to the parts. Raises
    CheckpointError."""
    parts = shards.all_own(parts_of(source / "consolidated.00.pth"))
    config = dict(MetaFile(parts[0]).config)
    for file in (*parts, source / PARAMS):
        (directory / file.name).symlink_to(file.absolute())
    # The first Llama came with one tokenizer beside the folders of its sizes.
    places = (source / MODEL, source.absolute().parent / MODEL)
    tokenizer = next((shards.own(file) for file in places if file.is_file()), None)
    if tokenizer is not None:
        text = read_tokenizer(tokenizer, config["vocab_size"], since_31="rope_scaling" in config)
        config.update(text.ids)
        for name, content in text.files.items():
            (directory / name).write_text(content, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
