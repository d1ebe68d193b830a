"""The command that reports versions, device, memory and caches, and what to do about problems."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .. import system
from ..checkpoints.stored_models import hub_cache, stored_models
from ..engine.known_pairs import USES, best_for, this_machine
from ..errors import SpecdecError
from ..system import show_size
from ..version import __version__
from . import render
from .flags import command
from .pairs import SLOW_ROWS

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "huggingface-hub")
EXTRAS = {"server": ("fastapi", "uvicorn"), "grammar": ("llguidance",), "llm": ("llm",)}
"""The packages of each extra, by the names under which pip installs them."""
ENOUGH_DISK = 20 * 10**9
"""Bytes of free disk below which a warning is due: the size of a model with 27 billion weights at 4
bits, with its drafter."""
OLDEST_MACOS = 14


Finding = tuple[str, str, str]
"""A line of the report: its name, its text, and the advice to the user, or "" if all is well."""


@command("mlx-specdec doctor")
def doctor() -> None:
    """Report versions, device, memory and caches.

    Each problem is followed by what to do about it. Nothing is downloaded or changed."""
    found = [*_software(), *_machine(), *_disk(), *_choices()]
    width = max(len(name) for name, _, _ in found)
    lines = [f"{name:<{width}}  {text}\n" for name, text, _ in found]
    problems = [f"\n{name}: {advice}" for name, _, advice in found if advice]
    render.write(sys.stdout, "".join(lines))
    render.lay_out(sys.stdout, *(problems or ["\nNo problems were found."]))


def _software() -> Iterator[Finding]:
    yield "mlx-specdec", f"{__version__}, {Path(__file__).resolve().parents[1]}", ""
    mac_version = platform.mac_ver()[0]
    kernel = f"macOS {mac_version}" if mac_version else platform.platform(terse=True)
    advice = ""
    if mac_version and int(mac_version.partition(".")[0]) < OLDEST_MACOS:
        advice = f"MLX needs macOS {OLDEST_MACOS} or newer: update macOS"
    if mac_version and platform.machine() != "arm64":
        advice = "this Python runs under Rosetta, where MLX has no GPU: install an arm64 Python"
    yield "system", f"Python {platform.python_version()}, {platform.machine()}, {kernel}", advice
    versions = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in versions.items() if version == "missing"]
    advice = f"install what is missing: pip install {' '.join(missing)}" if missing else ""
    yield "packages", ", ".join(map(" ".join, versions.items())), advice
    for name, packages in EXTRAS.items():
        there = "missing" not in map(_version, packages)
        yield f"extra {name}", "installed" if there else f"no: {system.install(name)}", ""


def _version(package: str) -> str:
    """Return the version of a package, or "missing"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _machine() -> Iterator[Finding]:
    import mlx.core as mx

    machine = this_machine()
    advice = SLOW_ROWS if machine.slow_rows else ""
    if sys.platform == "darwin" and not mx.metal.is_available():
        advice = "MLX finds no GPU here: in a virtual machine or under Rosetta it has none"
    yield "device", machine.name, advice
    room = f"{show_size(system.memory())}, {show_size(machine.room)} for models and caches"
    yield "memory", f"{room}, {show_size(machine.auto_room)} of them for --model auto", ""
    advice = f"install the faster one, which drafts need to gain: {system.install('fast-cpu')}"
    slow = machine.on_cpu and system.blas_is_slow()
    yield "BLAS of the CPU", system.blas_name(), advice if slow else ""


def _disk() -> Iterator[Finding]:
    cache, free = hub_cache(), system.free_disk(hub_cache())
    cached, problems = [], []
    try:
        cached = [one for one in stored_models() if one.in_hub]
    except SpecdecError as problem:
        problems.append(str(problem))
    if free < ENOUGH_DISK:
        shown = "mlx-specdec models shows what takes it"
        problems.append(f"make room: {show_size(free)} are free; {shown}")
    if broken := [one.name for one in cached if one.problem]:
        problems.append(f"{', '.join(broken)} came without weights: load or remove them")
    size = show_size(sum(one.nbytes for one in cached))
    count = f"{len(cached)} {'model' if len(cached) == 1 else 'models'}"
    summary = f"{cache}: {count}, {size}, {show_size(free)} free"
    yield "cache of the Hub", summary, next(iter(problems), "")
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    unset = "HF_HUB_OFFLINE forbids downloads: unset it to fetch models"
    yield "downloads", "forbidden" if offline else "allowed", unset if offline else ""
    place = system.cache_directory("")
    nbytes = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    yield "own cache", f"{place}: {show_size(nbytes)}", ""


def _choices() -> Iterator[Finding]:
    for use in USES:
        try:
            pair, bits = best_for(use, this_machine())
        except SpecdecError as problem:
            yield f"fits for {use}", "nothing of the table", str(problem)
        else:
            size = show_size(pair.nbytes(bits, this_machine().on_cpu))
            named = f"{pair.target.source(bits)[0]} with {pair.draft.name}"
            yield f"fits for {use}", f"{named}, {bits} bits, {size}", ""
