"""What a pair needs and what the machine has, in bytes.

Knows outlines, MLX's description of the device, and Linux's control groups. Nothing is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..models.outline import Outline

USABLE = 0.9
"""Of a machine's memory: the rest is the system's, and the working space of passes."""
CONTROL_GROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Needs:
    """Bytes of one model. caches: after the prompt and all generated tokens."""

    weights: int
    caches: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.weights + self.caches


@dataclass(frozen=True)
class Memory:
    """Bytes that a pair needs, and how many the device can give."""

    target: Needs
    draft: Needs
    limit: int

    @property
    def needed(self) -> int:
        """All weights and caches."""
        return self.target.total + self.draft.total

    @property
    def fits(self) -> bool:
        """Whether both models can work at once."""
        return self.needed <= self.limit


def needs(outline: Outline, prompt: int, generated: int) -> Needs:
    """What one model needs for a prompt and a text of so many tokens."""
    return Needs(outline.nbytes, outline.cache_nbytes(prompt, generated))


def limit() -> int:
    """Bytes that models may take on MLX's default device: what Metal recommends, else a share of
    the accelerator's memory or of the machine's."""
    info: Mapping[str, str | int] = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    own = info.get("total_memory") or info.get("memory_size")
    total = int(own) if own and mx.default_device() != mx.Device(mx.cpu) else physical()
    return int(USABLE * total)


def physical(groups: tuple[Path, ...] = CONTROL_GROUPS) -> int:
    """Bytes of the machine's memory, or of this process's share where it has a smaller one.

    groups: files with the limit of a control group, of which those that exist count.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [text for file in groups if (text := _read(file)).isdigit()]
    return min([total, *map(int, limits)])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
