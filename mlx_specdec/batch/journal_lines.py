"""The lines of a journal: each with its checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import OutputError

FORMAT = "mlx-specdec batch 2"


def header_of(line: bytes, partial: Path) -> Mapping[str, Any]:
    """What the first line of a journal says. Raises OutputError for a line of another file."""
    try:
        header: Any = json.loads(unsealed(line))
    except (ValueError, RecursionError):
        header = None
    known = isinstance(header, dict) and header.get("format") == FORMAT
    if not known or not isinstance(header.get("settings"), dict):
        raise OutputError(f"{partial} was not left by a run of this program: move it away")
    return cast(Mapping[str, Any], header)


def sealed(told: bytes) -> bytes:
    """A line with its checksum; JSON has no tabs of its own."""
    return b"%s\t%08x\n" % (told, zlib.crc32(told))


def unsealed(line: bytes) -> bytes:
    """What was sealed. Raises ValueError for a line that is not as it was written."""
    told = line.rpartition(b"\t")[0]
    if sealed(told) != line:
        raise ValueError("the checksum differs")
    return told


def text_line(line: bytes) -> bytes:
    """A result as a line of text, empty where there is none."""
    text: str = json.loads(line).get("text", "") if line else ""
    return (text.replace("\r", "\\r").replace("\n", "\\n") + "\n").encode("utf-8")
