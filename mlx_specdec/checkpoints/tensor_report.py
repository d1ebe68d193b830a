"""What a conversion makes of every tensor: read, renamed, tied, joined, dropped and why.

The readers say what they hold under the file's own names, the plans what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .formats.reader import Contents as Contents


def together(parts: Iterable[Contents]) -> Contents:
    """Several files of one model as one."""
    whole = Contents({}, {})
    for part in parts:
        whole = Contents(**{name: {**vars(whole)[name], **vars(part)[name]} for name in vars(part)})
    return whole


@dataclass(frozen=True)
class TensorReport:
    """Every tensor of a source, in the source's names.

    read: how many there are. renamed: source's name -> result's, where they differ. tied: left
    out -> the tensor with the same values that stays. joined: went into tensors that were computed
    from them. computed: the results of that. dropped: left out -> why.
    """

    read: int
    renamed: Mapping[str, str]
    tied: Mapping[str, str]
    joined: tuple[str, ...]
    computed: tuple[str, ...]
    dropped: Mapping[str, str]

    def describe(self) -> tuple[str, ...]:
        """In sentences; every tied and dropped tensor is named, each with its reason."""
        parts = [f"{len(self.renamed)} renamed"] if self.renamed else []
        parts += [f"{len(self.joined)} joined into {len(self.computed)}"] if self.joined else []
        parts += [f"{len(self.tied)} tied"] if self.tied else []
        parts += [f"{len(self.dropped)} dropped"] if self.dropped else []
        lines = [f"read {self.read} tensors: {', '.join(parts) or 'all kept under their names'}"]
        for twin, names in _grouped(self.tied).items():
            lines.append(f"tied, {twin} has the same values: {', '.join(names)}")
        for why, names in _grouped(self.dropped).items():
            lines.append(f"dropped, {why}: {', '.join(names)}")
        return tuple(lines)


def report_tensors(
    contents: Contents,
    kept: Mapping[str, str],
    *,
    tied: Mapping[str, str] | None = None,
    dropped: Mapping[str, str] | None = None,
    joined: Iterable[str] = (),
    computed: Iterable[str] = (),
) -> TensorReport:
    """The report of a conversion.

    kept: result's name -> the name under which the reader hands it out. tied, dropped and joined
    name tensors as the reader does; what the reader itself left out is added.
    """
    origins = contents.origins
    renamed = {origins[place]: name for name, place in kept.items() if origins[place] != name}
    twins = {origins[name]: origins.get(twin, twin) for name, twin in (tied or {}).items()}
    reasons = {origins[name]: why for name, why in (dropped or {}).items()}
    return TensorReport(
        read=len(contents.stored),
        renamed=renamed,
        tied={**contents.tied, **twins},
        joined=tuple(origins[name] for name in joined),
        computed=tuple(computed),
        dropped={**contents.dropped, **reasons},
    )


def _grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> the names that have it."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return names
