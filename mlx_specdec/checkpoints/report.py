"""What a conversion did and checked, for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .check import Differences
from .provenance import Provenance
from .tensor_report import TensorReport
from .verify import Verified


@dataclass(frozen=True)
class Report:
    """What a conversion wrote and how it was checked.

    parameters: weights, scales of quantized ones not counted. nbytes: of the tensors written.
    differences: see `check.Differences`. verified: what running both models showed.
    """

    path: Path
    tensors: int
    parameters: int
    nbytes: int
    dtype: str
    differences: Differences
    verified: Verified
    notes: tuple[str, ...]
    provenance: Provenance

    @property
    def tensor_report(self) -> TensorReport:
        """What became of each of the source's tensors."""
        return self.provenance.report

    @property
    def logits(self) -> float | None:
        """Largest absolute difference of log-probabilities, None where they were not compared."""
        return self.verified.logits

    @property
    def logits_note(self) -> str:
        """Why logits or text were not compared."""
        return self.verified.note

    @property
    def bits_per_weight(self) -> float:
        """Of the whole model, scales included."""
        return 8 * self.nbytes / max(1, self.parameters)

    def facts(self) -> dict[str, Any]:
        """What provenance.json says of the result."""
        differences = self.differences
        return {
            "dtype": self.dtype,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "largest_difference": differences.plain,
            "largest_difference_of_quantized": differences.quantized,
            **self.verified.facts(),
        }

    def describe(self) -> str:
        """All of it in a few lines."""
        differences = self.differences
        size = f"{self.parameters:,} weights, {self.nbytes / 1e6:,.1f} MB"
        lines = [f"wrote {self.path}: {size}, {self.dtype}, {self.bits_per_weight:.2f} bits each"]
        lines += self.provenance.describe()
        lines += self.notes
        checked = (
            f"read back {differences.tensors} tensors: largest difference {differences.plain:.3g}"
        )
        if differences.plain:
            checked += f" ({differences.plain_name})"
        if differences.quantized is not None:
            checked += (
                f", of quantized weights {differences.quantized:.3g} ({differences.quantized_name})"
            )
        lines.append(checked)
        lines += self.verified.describe()
        return "\n".join(lines)
