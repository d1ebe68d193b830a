"""What is told of a checkpoint that was inspected."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import shards
from .plans import Plan
from .report import TensorReport
from .tensors import LARGEST_EXTENT, Contents, TensorInfo

_SIZES = (
    *("d_model", "hidden_size", "n_embd", "d_ff", "intermediate_size"),
    *("num_layers", "num_hidden_layers", "n_layer", "num_decoder_layers"),
    *("num_heads", "num_attention_heads", "n_head", "num_key_value_heads", "vocab_size"),
)
_QUANTIZED = ("Q", "IQ", "TQ", "MXFP", "NVFP")  # so begin the names of GGUF's quantized types


@dataclass(frozen=True)
class Row:
    """One tensor. name, dtype, shape, nbytes: as the files have them. becomes: its name in a
    converted model, "" where it does not go there under one name. note: why not, or what else."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    becomes: str
    note: str


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    files: name -> bytes, of the weights. sizes: from the configuration. nbytes: of all tensors,
    those that share bytes counted once; kept_nbytes: without copies and what is dropped.
    parameters: of those, scales not counted where there is no `problem`. quantization, tokenizer:
    in words, "" for none. tensor_report: what a conversion would make of the tensors, None where
    `problem` says why it cannot be converted. drafter: of one on hidden states,
    `SpeculatorFiles.facts`.
    """

    path: Path
    format: str
    model_type: str
    files: Mapping[str, int]
    sizes: Mapping[str, int]
    tensors: tuple[Row, ...]
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
        """Of what is kept, scales included."""
        return 8 * self.kept_nbytes / max(1, self.parameters)

    @property
    def dtypes(self) -> dict[str, tuple[int, int]]:
        """Type -> how many tensors, and their bytes, the most bytes first."""
        sums: dict[str, tuple[int, int]] = {}
        for row in self.tensors:
            count, nbytes = sums.get(row.dtype, (0, 0))
            sums[row.dtype] = (count + 1, nbytes + row.nbytes)
        return dict(sorted(sums.items(), key=lambda pair: -pair[1][1]))

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON has it."""
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
            "dtypes": {
                dtype: {"tensors": count, "bytes": nbytes}
                for dtype, (count, nbytes) in self.dtypes.items()
            },
            "quantization": self.quantization or None,
            "tokenizer": self.tokenizer or None,
            "tied": None if report is None else dict(report.tied),
            "dropped": None if report is None else dict(report.dropped),
            "problem": self.problem or None,
            "drafter": None if self.drafter is None else dict(self.drafter),
            "tensors": [{**vars(row), "becomes": row.becomes or None} for row in self.tensors],
        }


def inspection_of(
    path: Path,
    kind: str,
    parts: Sequence[Path],
    config: Mapping[str, Any],
    contents: Contents,
    *,
    tokenizer: str = "",
    plan: Plan | None = None,
    problem: str,
) -> Inspection:
    """Of a checkpoint whose files are known. kind: of the format. parts: the files of weights."""
    report = None if plan is None else plan.report
    rows = tuple(_row(name, contents, report) for name in contents.stored)
    known = report or contents
    left = {*contents.shared, *known.tied, *known.dropped}
    inner = config.get("text_config")
    whole = {**config, **(inner if isinstance(inner, Mapping) else {})}
    return Inspection(
        path=path,
        format=shards.FORMATS[kind],
        model_type=str(config.get("model_type") or ""),
        files={file.name: file.stat().st_size for file in parts},
        sizes={
            name: whole[name]
            for name in _SIZES
            if type(whole.get(name)) is int and whole[name] <= LARGEST_EXTENT
        },
        tensors=rows,
        parameters=(
            sum(math.prod(row.shape) for row in rows if row.name not in left)
            if plan is None
            else plan.total_parameters
        ),
        nbytes=sum(row.nbytes for row in rows if row.name not in contents.shared),
        kept_nbytes=sum(row.nbytes for row in rows if row.name not in left),
        quantization=_quantization(contents.stored, plan),
        tokenizer=tokenizer,
        tensor_report=report,
        problem=problem,
    )


def _row(name: str, contents: Contents, report: TensorReport | None) -> Row:
    info, known = contents.stored[name], report or contents
    becomes, note = "", ""
    if name in known.tied:
        note = f"tied to {known.tied[name]}"
    elif name in known.dropped:
        note = f"dropped: {known.dropped[name]}" if report else known.dropped[name]
    elif report is not None and name in report.joined:
        note = "joined"
    elif report is not None:
        becomes = report.renamed.get(name, name)
    if name in contents.shared and not note:
        note = f"the bytes of {contents.shared[name]}"
    return Row(name, info.dtype, info.shape, info.nbytes, becomes, note)


def _quantization(stored: Mapping[str, TensorInfo], plan: Plan | None) -> str:
    """How weights are quantized, in words; "" where none are or nobody knows how."""
    if plan is not None and plan.stored:
        (how, _), *others = Counter(plan.stored.values()).most_common()
        mode = "" if how.mode == "affine" else f", {how.mode}"
        bits = sorted({other.bits for other, _ in others} - {how.bits})
        some = f"; some matrices {', '.join(map(str, bits))}" if bits else ""
        return f"{how.bits} bits in groups of {how.group_size}{mode}{some}"
    return ", ".join(sorted({i.dtype for i in stored.values() if i.dtype.startswith(_QUANTIZED)}))
