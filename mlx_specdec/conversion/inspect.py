"""Inspection of a checkpoint from its headers: its tensors, and the result of a conversion."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoints import files, shards
from ..checkpoints.disk import check_directory, read_json
from ..checkpoints.formats.gguf_blocks import TYPES
from ..checkpoints.source import as_directory, resolve, temporary_directory
from ..checkpoints.tensors import LARGEST_EXTENT, Contents, TensorInfo, TensorReader
from ..errors import CheckpointError, SourceError, SpecdecError
from ..models.drafters import kinds as speculators
from ..models.drafters import medusa
from .plan import Plan
from .plans import plan_for
from .report import TensorReport

_SIZES = (
    *("d_model", "hidden_size", "n_embd", "d_ff", "intermediate_size"),
    *("num_layers", "num_hidden_layers", "n_layer", "num_decoder_layers"),
    *("num_heads", "num_attention_heads", "n_head", "num_key_value_heads", "vocab_size"),
)


@dataclass(frozen=True)
class TensorRow:
    """A tensor of the files. becomes: The name in a converted model, "" if the tensor is dropped or
    joined. note: The reason, or a remark."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    becomes: str
    note: str


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint.

    Attributes:
        files: Name of a file of weights -> its bytes.
        sizes: The sizes of the model in config.json.
        nbytes: The bytes of all tensors. Tensors that share bytes are counted once.
        parameters, kept_nbytes: Number and bytes of weights, without copies and dropped tensors.
        quantization: A description of the quantization, "" for none.
        tokenizer: A description of the tokenizer, "" for none.
        tensor_report: The report of a conversion; None if it is impossible.
        problem: Why a conversion is impossible, or "".
        drafter: `DrafterFiles.facts` of a drafter.
    """

    path: Path
    format: str
    model_type: str
    files: Mapping[str, int]
    sizes: Mapping[str, int]
    tensors: tuple[TensorRow, ...]
    parameters: int
    nbytes: int
    kept_nbytes: int
    quantization: str
    tokenizer: str
    tensor_report: TensorReport | None
    problem: str
    drafter: Mapping[str, Any] | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of the tensors that a conversion keeps, scales included."""
        return 8 * self.kept_nbytes / max(1, self.parameters)

    @property
    def dtypes(self) -> dict[str, tuple[int, int]]:
        """Type -> number of tensors and their bytes, the most bytes first."""
        sums: dict[str, tuple[int, int]] = {}
        for row in self.tensors:
            count, nbytes = sums.get(row.dtype, (0, 0))
            sums[row.dtype] = (count + 1, nbytes + row.nbytes)
        return dict(sorted(sums.items(), key=lambda pair: -pair[1][1]))

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as values of JSON."""
        report = self.tensor_report
        return {
            "path": str(self.path),
            "format": self.format,
            "model_type": self.model_type or None,
            "files": dict(self.files),
            "sizes": dict(self.sizes),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
            "dtypes": {kind: {"tensors": n, "bytes": b} for kind, (n, b) in self.dtypes.items()},
            "quantization": self.quantization or None,
            "tokenizer": self.tokenizer or None,
            "tied": None if report is None else dict(report.tied),
            "dropped": None if report is None else dict(report.dropped),
            "problem": self.problem or None,
            "drafter": None if self.drafter is None else dict(self.drafter),
            "tensors": [{**vars(row), "becomes": row.becomes or None} for row in self.tensors],
        }


def _inspection(
    path: Path,
    kind: str,
    reader: TensorReader,
    config: Mapping[str, Any],
    *,
    tokenizer: str = "",
    plan: Plan | None = None,
    problem: str = "",
    drafter: Mapping[str, Any] | None = None,
) -> Inspection:
    """Return the inspection of some tensors. kind: A key of `shards.FORMAT_NAMES`."""
    contents, report = reader.contents, None if plan is None else plan.report
    rows = tuple(_row(name, contents, report) for name in contents.stored)
    listed = report or contents
    left = {*contents.shared, *listed.tied, *listed.dropped}
    remaining = [row for row in rows if row.name not in left]
    merged = dict(config)
    for name in ("text_config", "transformer_layer_config"):
        merged.update(config[name] if isinstance(config.get(name), Mapping) else {})
    sizes = {name: merged[name] for name in _SIZES if type(merged.get(name)) is int}
    return Inspection(
        path=path,
        format=shards.FORMAT_NAMES[kind],
        model_type=str(config.get("model_type") or ""),
        files={file.name: file.stat().st_size for file in reader.paths},
        sizes={name: size for name, size in sizes.items() if size <= LARGEST_EXTENT},
        tensors=rows,
        parameters=plan.total_parameters
        if plan
        else sum(math.prod(row.shape) for row in remaining),
        nbytes=sum(row.nbytes for row in rows if row.name not in contents.shared),
        kept_nbytes=sum(row.nbytes for row in remaining),
        quantization=_quantization(contents.stored, plan),
        tokenizer=tokenizer,
        tensor_report=report,
        problem=problem,
        drafter=drafter,
    )


def _row(name: str, contents: Contents, report: TensorReport | None) -> TensorRow:
    info, listed = contents.stored[name], report or contents
    becomes, note = "", ""
    if name in listed.tied:
        note = f"tied to {listed.tied[name]}"
    elif name in listed.dropped:
        note = f"dropped: {listed.dropped[name]}" if report else listed.dropped[name]
    elif report is not None and name in report.joined:
        note = "joined"
    elif report is not None:
        becomes = report.renamed.get(name, name)
    if name in contents.shared and not note:
        note = f"the bytes of {contents.shared[name]}"
    return TensorRow(name, info.dtype, info.shape, info.nbytes, becomes, note)


def _quantization(stored: Mapping[str, TensorInfo], plan: Plan | None) -> str:
    """Describe the quantization; return "" if there is none, or if it is not known."""
    if names := sorted({info.dtype for info in stored.values()} & TYPES.keys()):
        return ", ".join(names)
    if plan is not None and plan.stored:
        (how, _), *rest = Counter(plan.stored.values()).most_common()
        mode = "" if how.mode == "affine" else f", {how.mode}"
        bits = sorted({rare.bits for rare, _ in rest} - {how.bits})
        some = f"; some matrices {', '.join(map(str, bits))}" if bits else ""
        return f"{how.bits} bits in groups of {how.group_size}{mode}{some}"
    return ""


_SINGLE = {".safetensors": "safetensors", **dict.fromkeys((".bin", ".pt", ".pth"), "torch")}
"""Suffix of files that hold tensors without a configuration -> their format."""


def inspect(
    name: str, *, revision: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Inspection:
    """Inspect a directory, a file or a repository of the Hub. Raises SourceError, CheckpointError.

    For safetensors files on the Hub, only headers are downloaded. Other formats are downloaded
    whole, and `progress` is called with (done, total) bytes.
    """
    path = Path(os.path.expanduser(name))
    if os.path.lexists(path):
        return _inspect(path)
    with temporary_directory() as place:
        try:
            source = resolve(name, revision=revision, progress=progress, headers_in=Path(place))
            found = _inspect(source)
        except CheckpointError as caught:
            # The user does not know the temporary directory.
            raise CheckpointError(str(caught).replace(place, name)) from caught
    return replace(found, path=Path(name), problem=found.problem.replace(place, name))


def _inspect(path: Path) -> Inspection:
    if not os.path.exists(path):
        raise SourceError(f"{path!s} is a broken link: check the path")
    if path.is_file() and path.suffix in _SINGLE:
        problem = "a file of tensors alone: the model's directory says what they are"
        return _inspect_file(path, path, {}, problem)
    if path.is_file() and not shards.format_of(path):
        raise CheckpointError(f"{path} is of no format that is read here")
    if path.is_dir():
        check_directory(path)
        if medusa.is_medusa(path):
            config = {**read_json(path / "config.json"), "model_type": "Medusa heads"}
            base = f"{config.get(medusa.BASE_KEY)!a:.200}"
            problem = f"Medusa heads of the base model {base} are used as they are"
            return _inspect_file(path, medusa.file_of(path), config, problem)
        # A drafter that is not supported is shown as a model, below.
        with suppress(CheckpointError):
            if drafter := speculators.read(path):
                config = {**read_json(path / "config.json"), "model_type": drafter.kind}
                weights, plan = files.Weights(path), plan_for(path)
                facts = drafter.facts()
                return _inspection(path, weights.format, weights, config, plan=plan, drafter=facts)
    with as_directory(path) as directory:
        return _inspect_model(path, directory)


def _inspect_file(path: Path, file: Path, config: Mapping[str, Any], problem: str) -> Inspection:
    kind = _SINGLE[file.suffix]
    return _inspection(path, kind, files.READERS[kind](file), config, problem=problem)


def _inspect_model(path: Path, directory: Path) -> Inspection:
    weights = files.Weights(directory)
    config: Mapping[str, Any] = {}
    plan, problem = None, ""
    try:
        config = files.read_config(directory)
        plan = plan_for(directory)
    except SpecdecError as caught:
        problem = str(caught).replace(str(directory), str(path))
    tokenizer, form = _tokenizer(directory, made=directory != path), weights.format
    return _inspection(path, form, weights, config, tokenizer=tokenizer, plan=plan, problem=problem)


def _tokenizer(directory: Path, made: bool) -> str:
    file = directory / "tokenizer.json"
    names = [path.name for path in files.tokenizer_files(directory)]
    if not file.is_file():
        suffixes = (".model", ".spm", "vocab.json", "vocab.txt", ".tiktoken")
        return next((name for name in names if name.endswith(suffixes)), "")
    try:
        model = read_json(file).get("model")
    except CheckpointError:
        return "tokenizer.json, damaged"
    words = "tokenizer.json"
    if isinstance(model, Mapping):
        entries = model.get("vocab")
        count = len(entries) if isinstance(entries, list | dict) else 0
        words += f", {model.get('type', 'of no type')}, {count} entries"
    return words + (", made from the source's own" if made else "")
