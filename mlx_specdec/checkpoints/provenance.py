"""provenance.json: where a converted model comes from and what was done to it.

It names no directory of the machine and no time, so that the same conversion writes the same file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from .disk.digests import FileDigest, combined
from .tensor_report import TensorReport

FILE = "provenance.json"


@dataclass(frozen=True)
class Provenance:
    """Where a model comes from.

    name: a Hub name, or that of the directory or file. revision: the commit on the Hub, None for
    what is local. format: in words. source, result: file -> its digest, of weights and
    configuration.
    """

    name: str
    revision: str | None
    format: str
    source: Mapping[str, FileDigest]
    result: Mapping[str, FileDigest]
    report: TensorReport

    @property
    def source_digest(self) -> str:
        """Of all files of the source; see `digests.combined`."""
        return combined(self.source)

    @property
    def result_digest(self) -> str:
        """Of all files of the result."""
        return combined(self.result)

    def describe(self) -> tuple[str, ...]:
        """In lines; the digests are short, the file has them in full."""
        return (
            f"source {self.name}: {self.format}, digest {self.source_digest[:16]}",
            *self.report.describe(),
            f"digest of the result {self.result_digest[:16]}, all of this in {FILE}",
        )

    def write(self, directory: Path, facts: Mapping[str, Any]) -> None:
        """Write provenance.json. facts: of the result, what else is told. Raises OSError."""
        whole = {
            "tool": f"mlx-specdec {__version__}",
            "mlx": mx.__version__,  # type: ignore[attr-defined]
            "source": {
                "name": self.name,
                "revision": self.revision,
                "format": self.format,
                "digest": self.source_digest,
                "files": _files(self.source),
            },
            "result": {
                **facts,
                "digest": self.result_digest,
                "files": _files(self.result),
            },
            "tensors": asdict(self.report),
        }
        text = json.dumps(whole, indent=2, ensure_ascii=False)
        # Bytes of a name that are no text become escapes, which JSON has as well.
        (directory / FILE).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def _files(digests: Mapping[str, FileDigest]) -> dict[str, Any]:
    return {
        name: {"bytes": digest.nbytes, "sha256": digest.sha256} for name, digest in digests.items()
    }
