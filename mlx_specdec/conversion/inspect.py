"""Inspection of a checkpoint from its headers: its tensors, and the result of a conversion."""

import math
import os
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..checkpoints import files, shards
from ..checkpoints.disk import check_directory, read_json
from ..checkpoints.formats.gguf_blocks import TYPES
from ..checkpoints.quantization import ALL_PARTS
from ..checkpoints.source import as_directory, resolve, temporary_directory
from ..checkpoints.tensors import LARGEST_SIZE, TensorInfo, TensorReader
from ..errors import CheckpointError, SourceError, SpecdecError
from ..models.drafters import kinds as speculators
from ..models.drafters import medusa
from ..models.drafters.files import DrafterFiles
from .plans import plan_for
from .report import Plan, TensorReport

_SIZES = (
    *("d_model", "hidden_size", "n_embd", "d_ff", "intermediate_size"),
    *("num_layers", "num_hidden_layers", "n_layer", "num_decoder_layers"),
    *("num_heads", "num_attention_heads", "n_head", "num_key_value_heads", "vocab_size"),
)
_LAYER = re.compile(r"(?<=[a-z])\.\d+\.")


Inspection = tuple[dict[str, Any], Sequence[str]]
"""The contents of a checkpoint as values of JSON, and the lines of the report of a conversion.

The bytes of all tensors count those that share bytes once. "parameters" and "bits_per_weight" leave
out copies and tensors that a conversion drops. "problem" says why a conversion is impossible.
"drafter" holds `DrafterFiles.facts`."""


def _facts(
    path: Path,
    kind: str,
    reader: TensorReader,
    config: Mapping[str, Any],
    plan: Plan | None = None,
    **more: Any,
) -> Inspection:
    """Return the inspection of some tensors.

    Args:
        kind: A key of `shards.FORMAT_NAMES`.
        more: "tokenizer", "problem" and "drafter", if they are known.
    """
    report = None if plan is None else plan.report
    rows = [_row(name, reader, report) for name in reader.stored]
    listed = report or reader
    left = {*reader.shared, *listed.tied, *listed.dropped}
    remaining = [row for row in rows if row["name"] not in left]
    parts = (config.get("transformer_layer_config"), config.get("text_config"), config)
    merged = ChainMap(*(dict(part) for part in parts if isinstance(part, Mapping)))
    sizes = {name: merged[name] for name in _SIZES if type(merged.get(name)) is int}
    counted = (math.prod(row["shape"]) for row in remaining)
    parameters = plan.total_parameters if plan else sum(counted)
    facts = {
        "path": str(path),
        "format": shards.FORMAT_NAMES[kind],
        "model_type": str(config.get("model_type") or "") or None,
        "files": {file.name: file.stat().st_size for file in reader.paths},
        "sizes": {name: size for name, size in sizes.items() if size <= LARGEST_SIZE},
        "parameters": parameters,
        "bytes": sum(row["nbytes"] for row in rows if row["name"] not in reader.shared),
        "bits_per_weight": 8 * sum(row["nbytes"] for row in remaining) / max(1, parameters),
        "dtypes": _dtypes(rows),
        "quantization": _quantization(reader.stored, plan) or None,
        "tokenizer": more.get("tokenizer") or None,
        "tied": None if report is None else dict(report.tied),
        "dropped": None if report is None else dict(report.dropped),
        "problem": more.get("problem") or None,
        "drafter": more.get("drafter"),
        "tensors": rows,
    }
    return facts, () if report is None else report.describe()


def _dtypes(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the tensors and the bytes of each type, the most bytes first."""
    sums: dict[str, dict[str, int]] = {}
    for row in rows:
        entry = sums.setdefault(row["dtype"], {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += row["nbytes"]
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]["bytes"]))


def _row(name: str, reader: TensorReader, report: TensorReport | None) -> dict[str, Any]:
    """Return the facts of a tensor of the files. "becomes": The name in a converted model, None if
    the tensor is dropped or joined. "note": The reason, or a remark."""
    info, listed = reader.stored[name], report or reader
    becomes, note = "", ""
    if name in listed.tied:
        note = f"tied to {listed.tied[name]}"
    elif name in listed.dropped:
        note = f"dropped: {listed.dropped[name]}" if report else listed.dropped[name]
    elif report is not None and name in report.joined:
        note = "joined"
    elif report is not None:
        becomes = report.renamed.get(name, name)
    if name in reader.shared and not note:
        note = f"the bytes of {reader.shared[name]}"
    size = {"dtype": info.dtype, "shape": list(info.shape), "nbytes": info.nbytes}
    return {"name": name, **size, "becomes": becomes or None, "note": note}


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[int]]:
    """Group tensors of an inspection that differ only in the number of their layer. The size of a
    quantized tensor includes its scales and biases.

    Returns:
        The names of a tensor here and in the result with a note, each on a line; its type; its
        shape -> the bytes of each of these tensors.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    sizes = {row["name"]: row["nbytes"] for row in rows}
    for row in rows:
        path, _, part = row["name"].rpartition(".")
        packed = f"{path}.scales" in sizes and part in ALL_PARTS
        if packed and part != "weight":
            continue
        nbytes = sum(sizes.get(f"{path}.{p}", 0) for p in ALL_PARTS) if packed else row["nbytes"]
        dtype = f"{row['dtype']}, quantized" if packed else row["dtype"]
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        becomes = f"-> {row['becomes']}" if row["becomes"] not in (None, row["name"]) else ""
        parts = [_LAYER.sub(".*.", part, 1) for part in (row["name"], becomes, row["note"]) if part]
        groups.setdefault(("\n".join(parts), dtype, shape), []).append(nbytes)
    return groups


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
            facts, lines = _inspect(source)
        except CheckpointError as caught:
            # The user does not know the temporary directory.
            raise CheckpointError(str(caught).replace(place, name)) from caught
    problem = (facts["problem"] or "").replace(place, name)
    return {**facts, "path": name, "problem": problem or None}, lines


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
    with as_directory(path) as directory:
        weights, problem = files.Weights(directory), ""
        described: dict[str, Any] = {}
        drafter: DrafterFiles | None = None
        plan: Plan | None = None
        with suppress(CheckpointError):  # a drafter that is not supported is shown as a model
            drafter = speculators.read(directory)
        try:
            if drafter is None:
                described = files.read_config(directory)
            else:
                described = {**read_json(directory / "config.json"), "model_type": drafter.kind}
            plan = plan_for(directory)
        except SpecdecError as caught:
            problem = str(caught).replace(str(directory), str(path))
        tokenizer = files.vocabulary_file(directory) if drafter is None else ""
        if tokenizer and directory != path:
            tokenizer += ", made from the source's own"
        facts = None if drafter is None else drafter.facts()
        more = {"tokenizer": tokenizer, "problem": problem, "drafter": facts}
        return _facts(path, weights.format, weights, described, plan, **more)


def _inspect_file(path: Path, file: Path, config: Mapping[str, Any], problem: str) -> Inspection:
    kind = _SINGLE[file.suffix]
    return _facts(path, kind, files.READERS[kind](file), config, problem=problem)
