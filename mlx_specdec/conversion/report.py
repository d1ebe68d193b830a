"""Plans and reports of conversions: what becomes of every tensor, and what was written."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoints.disk import blocks, reading
from ..checkpoints.files import Weights
from ..checkpoints.quantization import Quantization
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import ResultTensor, Written
from ..version import __version__

PROVENANCE = "provenance.json"
FileDigests = Mapping[str, Mapping[str, Any]]
"""Name of a file -> its size as "bytes", and its SHA-256 as "sha256"."""


@dataclass(frozen=True)
class TensorReport:
    """The fate of every tensor of a source. Keys are the source's names.

    Attributes:
        read: The number of the source's tensors.
        renamed: Name -> the result's name.
        tied: Name of a tensor that was left out -> the tensor with the same values.
        joined: Tensors that were joined into the tensors of `computed`.
        computed: Names of the result's tensors that were computed from several.
        dropped: Name of another tensor that was left out -> the reason.
    """

    read: int
    renamed: Mapping[str, str]
    tied: Mapping[str, str]
    joined: tuple[str, ...]
    computed: tuple[str, ...]
    dropped: Mapping[str, str]

    def describe(self) -> tuple[str, ...]:
        """Return lines that name every tied and dropped tensor with the reason."""
        joined = f"joined into {len(self.computed)}"
        kinds = {"renamed": self.renamed, joined: self.joined, "tied": self.tied}
        kinds["dropped"] = self.dropped
        parts = [f"{len(names)} {kind}" for kind, names in kinds.items() if names]
        lines = [f"read {self.read} tensors: {', '.join(parts) or 'all kept under their names'}"]
        reasons = {name: f"tied, {twin} has the same values" for name, twin in self.tied.items()}
        reasons |= {name: f"dropped, {why}" for name, why in self.dropped.items()}
        for why in dict.fromkeys(reasons.values()):
            lines.append(f"{why}: {', '.join(n for n, reason in reasons.items() if reason == why)}")
        return tuple(lines)


def report_tensors(
    weights: Weights,
    written: Mapping[str, str],
    *,
    tied: Mapping[str, str],
    dropped: Mapping[str, str],
    joined: Iterable[str] = (),
    computed: Iterable[str] = (),
) -> TensorReport:
    """Return the report of all tensors of a source. written: The result's name -> the reader's.
    tied, dropped, joined, computed: See `TensorReport`, with the reader's names."""
    origins = weights.origins
    twins = {origins[name]: origins.get(twin, twin) for name, twin in tied.items()}
    return TensorReport(
        read=len(weights.stored),
        renamed={
            origins[place]: name
            for name, place in written.items()
            if origins.get(place, name) != name
        },
        tied={**weights.tied, **twins},
        joined=tuple(origins[name] for name in joined if name in origins),
        computed=tuple(computed),
        dropped={**weights.dropped, **{origins[name]: why for name, why in dropped.items()}},
    )


@dataclass(frozen=True)
class Plan:
    """The tensors to write for a source, and how each of them is changed.

    Attributes:
        weights: The source's weights.
        config: config.json of the result, with the source's quantization entry.
        tensors: Final name -> tensor of the source, not read yet.
        stored: Path of a matrix that is quantized in the source -> its quantization.
        quantized: Final name of a matrix -> how the conversion quantizes it.
        natural: Final name -> the dtype if the user names none, for tensors whose stored dtype is
            not suitable.
        keeps_dtype: Whether a tensor keeps its dtype even if the user names another.
        notes: Sentences for the user.
        extra: Tensors for a file that mlx-lm does not read; see `mtp_layers`.
        not_run: Why the result cannot be run to verify it; "" if it can.
    """

    weights: Weights
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    report: TensorReport
    stored: Mapping[str, Quantization] = field(default_factory=dict)
    quantized: Mapping[str, Quantization] = field(default_factory=dict)
    natural: Mapping[str, mx.Dtype] = field(default_factory=dict)
    keeps_dtype: Callable[[str], bool] = lambda name: False
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    not_run: str = ""

    def parameters(self, name: str) -> int:
        """Count the weights in a tensor, which are packed if it is quantized. Scales are none."""
        path, _, part = name.rpartition(".")
        how, size = self.stored.get(path), self.tensors[name].size
        if how is not None and part in how.parts:
            return 0
        return size * 32 // how.bits if how is not None and part == "weight" else size

    @property
    def total_parameters(self) -> int:
        return sum(map(self.parameters, self.tensors))

    def outputs(self, dtype: str | None) -> list[ResultTensor]:
        """Return what a conversion writes. dtype: None keeps the stored one."""

        def output(name: str, tensor: Tensor) -> ResultTensor:
            casts = mx.issubdtype(tensor.dtype, mx.floating) and not self.keeps_dtype(name)
            wanted = self.natural.get(name) if dtype is None else getattr(mx, dtype)
            how = self.quantized.get(name)
            return ResultTensor(name, tensor, self.parameters(name), wanted if casts else None, how)

        return [output(name, tensor) for name, tensor in self.tensors.items()]


@dataclass(frozen=True)
class TextChange:
    """The scores of a fixed text under the source and the result, teacher-forced.

    Attributes:
        tokens: The number of tokens.
        source_perplexity, result_perplexity: exp(-mean log p).
        mean, largest: Mean and largest absolute change of the tokens' log p, in nats.
        same_first: The share of positions with the same most likely token.
    """

    tokens: int
    source_perplexity: float
    result_perplexity: float
    mean: float
    largest: float
    same_first: float

    def describe(self) -> str:
        """Return the figures in one line."""
        return (
            f"fixed text of {self.tokens} tokens: perplexity {self.source_perplexity:.4g} -> "
            f"{self.result_perplexity:.4g}, log-probability changes by {self.mean:.3g} on average, "
            f"{self.largest:.3g} at most; same first choice at {self.same_first:.1%}"
        )


@dataclass(frozen=True)
class Verified:
    """The result of comparing the models. logits: The largest difference of log-probabilities, None
    if they were not compared. text: The scores of the fixed text, None if it was not scored. note:
    The reason."""

    logits: float | None
    text: TextChange | None
    note: str

    def describe(self) -> list[str]:
        if self.logits is None:
            return [f"logits not compared: {self.note}"]
        lines = [f"log-probabilities on a fixed input: largest difference {self.logits:.3g}"]
        if self.note:
            lines.append(f"fixed text not scored: {self.note}")
        return lines if self.text is None else [*lines, self.text.describe()]


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion.

    Attributes:
        name: The name of the source.
        revision: The source's commit on the Hub, None for a local source.
        format: A description of the source's format.
        source, result: Digests of the files of weights and configuration.
        dtype: A description of the result's dtype and quantization.
        notes: Sentences for the user.
        verdict: A warning if the result is poor, or "".
    """

    path: Path
    name: str
    revision: str | None
    format: str
    source: FileDigests
    result: FileDigests
    dtype: str
    written: Written
    tensor_report: TensorReport
    notes: tuple[str, ...]
    verified: Verified
    verdict: str = ""

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of the whole model, scales included."""
        return 8 * self.written.nbytes / max(1, self.written.parameters)

    def write(self, directory: Path) -> None:
        """Write provenance.json. Raises OSError."""
        text, largest = self.verified.text, self.written.largest
        named = {"name": self.name, "revision": self.revision, "format": self.format}
        provenance = {
            **maker(),
            "source": {**named, "digest": combined(self.source), "files": self.source},
            "result": {
                "dtype": self.dtype,
                "tensors": self.written.tensors,
                "parameters": self.written.parameters,
                "bytes": self.written.nbytes,
                "bits_per_weight": round(self.bits_per_weight, 4),
                "largest_difference": largest.get(False, (0.0,))[0],
                "largest_difference_of_quantized": largest.get(True, (None,))[0],
                "largest_difference_of_log_probabilities": self.verified.logits,
                "fixed_text": None if text is None else asdict(text),
                "digest": combined(self.result),
                "files": self.result,
            },
            "tensors": asdict(self.tensor_report),
        }
        # Bytes of a file name that are not UTF-8 are written as escapes.
        (directory / PROVENANCE).write_text(
            json.dumps(provenance, indent=2, ensure_ascii=False) + "\n",
            encoding="utf-8",
            errors="backslashreplace",
        )

    def describe(self) -> str:
        """Return a few lines of text, with shortened digests."""
        plain, name = self.written.largest.get(False, (0.0, ""))
        size = f"{self.written.parameters:,} weights, {self.written.nbytes / 1e6:,.1f} MB"
        count = sum(map(len, self.written.files.values()))
        checked = f"read back {count} tensors: largest difference {plain:.3g}"
        checked += f" ({name})" if plain else ""
        if quantized := self.written.largest.get(True):
            checked += f", of quantized weights {quantized[0]:.3g} ({quantized[1]})"
        lines = (
            f"wrote {self.path}: {size}, {self.dtype}, {self.bits_per_weight:.2f} bits each",
            f"source {self.name}: {self.format}, digest {combined(self.source)[:16]}",
            *self.tensor_report.describe(),
            f"digest of the result {combined(self.result)[:16]}, all of this in {PROVENANCE}",
            *self.notes,
            checked,
            *self.verified.describe(),
            self.verdict,
        )
        return "\n".join(filter(None, lines))


def maker() -> dict[str, str]:
    """Return the versions of the programs that made a model, for provenance.json."""
    return {"tool": f"mlx-specdec {__version__}", "mlx": mx.__version__}  # type: ignore[attr-defined]


def digesting(paths: Iterable[Path], found: dict[str, Mapping[str, Any]]) -> Iterator[int]:
    """Put the size and the SHA-256 of each file into `found`, by its name. Yield the bytes of each
    block, so that files can be read while something else reads them. Raises CheckpointError."""
    for file in paths:
        nbytes, digest = file.stat().st_size, hashlib.sha256()
        with reading(file), file.open("rb") as stream:
            for block in blocks(stream, nbytes):
                digest.update(block)
                yield len(block)
        found[file.name] = {"bytes": nbytes, "sha256": digest.hexdigest()}


def digests_of(paths: Iterable[Path]) -> FileDigests:
    """Return the sizes and digests of files. Raises CheckpointError."""
    found: dict[str, Mapping[str, Any]] = {}
    for _ in digesting(paths, found):
        pass
    return found


def combined(files: FileDigests) -> str:
    """Return one digest of several files: the SHA-256 of sha256sum's output, sorted by name."""
    lines = (f"{files[name]['sha256']}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
