"""The commands about a machine: what is installed, which pairs of models fit, and what one pair
takes before a download."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import system
from ..checkpoints.stored_models import hub_cache, stored_models
from ..core.options import mtp_of
from ..engine.known_pairs import (
    BITS,
    USES,
    KnownPair,
    Machine,
    best,
    best_for,
    known_pair,
    known_pairs,
    mac,
    this_machine,
)
from ..errors import OptionError, SpecdecError
from ..system import show_size
from ..version import __version__
from . import render
from .flags import Flags, Json, command, flag
from .loading import Sources

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "huggingface-hub")
EXTRAS = {"server": ("fastapi", "uvicorn"), "grammar": ("llguidance",), "llm": ("llm",)}
"""The packages of each extra, by the names under which pip installs them."""
ENOUGH_DISK = 20 * 10**9
"""Bytes of free disk below which a warning is due: the size of a model with 27 billion weights at 4
bits, with its drafter."""
OLDEST_MACOS = 14
DISPENSABLE_COLUMNS = dict.fromkeys(("others", "16 bits", "contrary", "measured by"), "")
DISPENSABLE_COLUMNS |= {"draft": "kind", **dict.fromkeys(("8 bits", "4 bits", "class", "bits"), "")}
"""Columns that are left out on a narrow terminal, in this order. The kind of the draft is shown if
its name is left out."""
PAIRS_NOTE = (
    "Sizes are those of target and draft at so many bits and of caches of 8k tokens; those in "
    "parentheses do not fit. Without a known chip, an M4 Pro is assumed. Tokens/s are without and "
    "with drafts, for chat, at the bits that are fastest here: what others measured with their "
    "own programs, times the ratio of memory bandwidths. Those in parentheses are computed, since "
    "nobody has published the gain at these bits. The class is the quality of the target, A to E. "
    "A wide terminal shows the names of drafts, which --draft-model auto takes. This program was "
    "run with the pairs in weights/ only. Loading a pair compares both tokenizers token by token, "
    "and bench measures any pair."
)
SLOW_ROWS = (
    "The GPU of an M1 or M2 reads quantized weights once for every row of a pass, so drafts of a "
    "model gain little there or lose. Lookup (--proposer ngram) still pays where text repeats."
)
ESTIMATE_NOTE = (
    "These figures come from sizes and from the speed of matrices on this machine. Drafts of one "
    "family are mostly accepted at 60 to 80 %; mlx-specdec bench measures it with the real weights."
)

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


class Which(Flags, panel="Pairs"):
    name: str | None = flag(
        "Show the pairs whose names contain this word.", argument=True, metavar="NAME"
    )
    memory: str | None = flag(
        "Show what a Mac can run: its memory, such as 32GB or 'M4 Pro 48GB'.", metavar="SIZE"
    )


@command("mlx-specdec pairs", "mlx-specdec pairs qwen3", "mlx-specdec pairs --memory 'M4 Pro 48GB'")
def pairs(which: Which, output: Json) -> None:
    """Show targets and drafts that fit a machine.

    Nothing is downloaded. With --draft-model auto, commands take the draft from this table. With
    --model auto, they take the best pair for chat. With auto:code, it is the best pair for code,
    and with auto:fast the fastest one."""
    wanted = (which.name or "").lower()
    machine = this_machine() if which.memory is None else mac(which.memory)
    limit = machine.room
    table = known_pairs()
    found = [one for one in table if wanted in f"{one.target.name} {one.draft.name}".lower()]
    if not found:
        raise OptionError(f"no pair with {which.name} in its names: mlx-specdec pairs lists all")
    shown = [one for one in found if wanted or one.nbytes(BITS[0], machine.on_cpu) <= limit]
    targets = {
        name: [one for one in found if one.target.name == name]
        for name in dict.fromkeys(one.target.name for one in shown)
    }
    subject = "This machine" if which.memory is None else "Such a machine"
    text = f"{subject} ({machine.name}) has {show_size(limit)} for models and caches."
    if machine.slow_rows:
        text += f" {SLOW_ROWS}"
    if hidden := len({one.target.name for one in found}) - len(targets):
        text += f" Left out are {hidden} larger targets; mlx-specdec pairs NAME shows them."
    if not output.json:
        rows = [_row(several, machine) for several in targets.values()]
        fitted = render.fitted(sys.stdout, rows, DISPENSABLE_COLUMNS)
        render.lay_out(sys.stdout, text)
        render.lay_out(sys.stdout, fitted, wrap=False)
        render.lay_out(sys.stdout, PAIRS_NOTE)
    groups = [(use, use, [one for one in shown if use in one.uses]) for use in USES]
    if which.name:
        groups = [(which.name, USES[0], shown)]
        machine = replace(machine, auto_room=machine.room)
    chosen = []
    for use, purpose, some in groups:
        if (choice := best(some, purpose, machine)) is None:
            render.tell(f"no pair for {use} fits with a known gain")
            continue
        one, bits = choice
        about = {"for": use, "bits": bits, "command": command_line(one, bits)}
        chosen.append({**about, **_payload(one, machine)})
        if not output.json:
            lines = "\n".join(_advice(use, purpose, one, bits, machine))
            render.write(sys.stdout, f"\n{lines}\n")
    if output.json:
        rows = [_payload(one, machine) for one in found]
        about = {"device": machine.name, "memory_bytes": limit}
        render.write(sys.stdout, render.as_json({**about, "best": chosen, "pairs": rows}))


def _row(several: Sequence[KnownPair], machine: Machine) -> dict[str, str]:
    """Return the cells of a target by column. several: All pairs of the target. The row shows the
    fastest pair, without a speed if no pair gains."""
    choice = best(several, USES[0], replace(machine, auto_room=machine.room), any_class=True)
    one, bits = choice or (several[0], 0)
    plain, fast = (machine.speed * one.speed(bits, use) for use in ("plain", USES[0]))
    speeds = f"{plain:.0f} to {fast:.0f}" if choice else ""
    if choice and one.gain(bits, USES[0]) is None:
        speeds = f"({speeds})"
    sizes = {f"{n} bits": one.nbytes(n, machine.on_cpu) for n in one.target.bits}
    return {
        "target": one.target.name,
        "class": one.target.quality,
        **dict.fromkeys((f"{n} bits" for n in BITS), ""),
        **{
            column: show_size(size) if size <= machine.room else f"({show_size(size)})"
            for column, size in sizes.items()
        },
        "draft": one.draft.name,
        "kind": one.kind,
        "bits": str(bits or ""),
        "tokens/s": speeds,
        "measured by": render.measured_by(one) if one.gains else "",
        "contrary": one.contrary,
        "others": ", ".join(pair.kind for pair in several if pair is not one),
    }


def command_line(one: KnownPair, bits: int, command: str = "chat") -> str:
    """Return the command line that names a pair."""
    words = ["mlx-specdec", command]
    sources = {"": one.target.source(bits), "draft-": one.draft_source(bits)}
    for which, (name, q_bits) in sources.items():
        words += [f"--{which}model", name, *([f"--{which}q-bits", str(q_bits)] if q_bits else [])]
    return " ".join(words)


def _advice(heading: str, use: str, one: KnownPair, bits: int, machine: Machine) -> Iterator[str]:
    size = show_size(one.nbytes(bits, machine.on_cpu))
    yield f"For {heading}: {one.target.name} at {bits} bits, class {one.target.quality}, {size}."
    yield f"  {command_line(one, bits)}"
    yield f"  Speed: {render.told_speed(one, bits, use, machine)}."
    if one.kind != "mtp":
        yield f"  What it gains here: {command_line(one, bits, 'estimate')}"


def _payload(one: KnownPair, machine: Machine) -> dict[str, Any]:
    sizes = {bits: one.nbytes(bits, machine.on_cpu) for bits in BITS if bits in one.target.bits}
    return {
        "target": one.target.name,
        "target_billions": one.target.billions,
        "draft": one.draft.name,
        "draft_billions": one.draft.billions,
        "kind": one.kind,
        "run": one.run,
        "quality": one.target.quality,
        "gains": one.gains,
        "tokens_per_second": {
            bits: {use: round(machine.speed * speed, 1) for use, speed in speeds.items()}
            for bits, speeds in one.speeds.items()
        },
        "source": one.source,
        "contrary": one.contrary,
        "bytes": sizes,
        "fits": [bits for bits, size in sizes.items() if size <= machine.room],
    }


class Estimated(Sources):
    prompt_tokens: int = flag("The number of tokens of the prompt.", 128, min=1, panel="Prompt")


@command("mlx-specdec estimate --model Qwen/Qwen3-8B --draft-model auto --q-bits 4")
def estimate(sources: Estimated, output: Json) -> None:
    """Predict a pair's memory and speedup before its download.

    Only config.json and the headers of the weights are read."""
    model, draft_model = sources.named()
    if draft_model is None or mtp_of(draft_model) is not None:
        raise OptionError("name a draft model, or the directory of a drafter, with --draft-model")
    from ..measure.estimate import GENERATED
    from ..measure.estimate import estimate as predict
    from ..models.number_format import NumberFormat

    numbers = [
        NumberFormat(sources.dtype, q_bits, expand=sources.expand_weights)
        for q_bits in (sources.q_bits, sources.draft_q_bits)
    ]
    count = sources.prompt_tokens
    found = predict((model, draft_model), sources.revision, numbers, count)
    target, fits, known = found["target"], found["fits"], known_pair(model, draft_model)
    found["known_gain"] = known and render.told_gain(known, target["bits"] or 16, USES[0])
    if output.json:
        render.write(sys.stdout, render.as_json(found))
        return
    caches = f">caches of {count} + {GENERATED} tokens"
    sides = render.table("model", "numbers", ">weights", caches, ">read in a step")
    for one in (target, found["draft"]):
        sizes = (show_size(one[f"{part}_bytes"]) for part in ("weights", "caches", "step"))
        bits = f"{one['bits']}-bit, " if one["bits"] else ""
        sides.add_row(one["name"], f"{bits}{one['dtype']}", *sizes)
    need, limit = show_size(found["memory_bytes"]), show_size(found["memory_limit_bytes"])
    answer = "They fit." if fits else "They do NOT fit: take smaller models or fewer bits."
    lines = [sides, f"Both take {need}, and models may take {limit} here. {answer}"]
    if fits:
        table = render.table(">acceptance rate", ">draft length", ">speedup", ">tokens/s")
        form = "{acceptance_rate:.0%} {num_draft} {speed_up:.2f} {tokens_per_second:.1f}"
        for row in found["gains"]:
            table.add_row(*form.format(**row).split())
        lines += [table]
    lines += [f"The table of pairs: {found['known_gain']}."] if found["known_gain"] else []
    render.lay_out(sys.stdout, *lines, ESTIMATE_NOTE)
