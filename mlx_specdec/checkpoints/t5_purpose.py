"""Which checkpoints of the T5 family cannot generate text: encoders alone, classifiers.

Knows names of tensors and architectures. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_ENCODER = re.compile(r"(.*\.)?encoder\.block\.")
_DECODER = re.compile(r"(.*\.)?decoder\.block\.")
_LABELS = ("classification_head.", "classifier.", "qa_outputs.")
"""Heads that say a label or a place and never a word."""


def check_generates(directory: Path, config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """Raises CheckpointError for a T5 that has no decoder, or a head for something else than text.

    stored: names of all tensors, as the file has them. The architecture that config.json names is
    not asked for, since copied configurations name the wrong one; it is only told.
    """
    names = list(stored)
    listed = config.get("architectures")
    named = str(listed[0])[:80] if isinstance(listed, list) and listed else ""
    shown = f" ({named})" if named else ""
    if any(name.startswith(_LABELS) for name in names):
        raise CheckpointError(
            f"{directory} holds a model that gives labels{shown}, not text: take one that is a "
            "ForConditionalGeneration"
        )
    if any(map(_ENCODER.match, names)) and not any(map(_DECODER.match, names)):
        raise CheckpointError(
            f"{directory} holds an encoder alone{shown}, which cannot generate text: take "
            "the whole model"
        )
