"""Every name in backticks, in the documentation and in docstrings of the package, exists."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command

from mlx_specdec.cli.app import app

from .support.shipped import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted((ROOT / "mlx_specdec").rglob("*.py"))
PLACES = [ROOT, ROOT / "mlx_specdec", ROOT / "docs", ROOT / "scripts"]
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
ALL = re.compile(r".+", re.DOTALL)
COMMENT = re.compile(r"(?:^|  )# .*$", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
PATH = re.compile(r"([\w.-]+/)*([\w-]+/|[\w-]+\.(?:py|md|sh|txt|jsonl|toml))(?::(\w+))?")
NAME = re.compile(r"(?<![\w./-])[A-Za-z_][\w.]*(?![\w/-])")
ONE_NAME = re.compile(r"[A-Za-z_][\w.]*(\(.*\))?( ?=.*)?")
MEMBER = re.compile(r"(?:.*\.)?(\w+)\.(?!json$|yaml$|safetensors$|sh$|spm$|model$)(\w+)")
ELSEWHERE = {
    "an example": {"OUTPUT", "mlx_specdec/proposers/repeat.py", "namespace__name", "NN"},
    "a part of a repository's name": {"-assistant", "-speculator"},
    "tensors of checkpoints": {"weight_scale_inv"},
    "JSON of the server": {"metrics.speculative_decoding"},
    "Claude Code": {"cc_entrypoint"},
    "a language of NLLB-200": {"fra_Latn"},
    "macOS": {"ibv_devices", "ipc", "kern", "rdma_ctl", "rdma_en", "somaxconn"},
    "MLX and mlx-vlm": {
        "MLX_METAL_FAST_SYNCH",
        "MLX_PTX_CACHE_DIR",
        "has_fused_kernel",
        "split_mtp",
    },
    "an earlier release": {
        *("estimated_gains", "working", "PromptCache.texts", "Run.read_prompt"),
        *("--drain-seconds", "num_requests_running", "num_requests_waiting"),
        *("taps", "compare_logits", "compare_text", "download_progress", "upload_repo"),
    },
    "flags of mlx.distributed_config": {"--auto-setup", "--output-hostfile", "--over"},
    "flags of pip and AIPerf": {"--endpoint-type", "--no-deps", "--streaming", "--wheel-dir"},
}
"""Owner -> names that neither the package nor the tests use."""


@functools.cache
def code_of(file: Path) -> str:
    """Return a module without comments and docstrings."""
    return COMMENT.sub("", STRING.sub("", file.read_text("utf-8")))


@functools.cache
def words() -> frozenset[str]:
    """Return the words and the flags in the code of the repository."""
    folders = ("mlx_specdec", "tests", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    texts = [code_of(file) for file in files if file != Path(__file__)]
    tables = (ROOT / "mlx_specdec").rglob("*.toml")
    settings = (ROOT / "pyproject.toml", *(ROOT / "scripts").glob("*"), *tables)
    texts += [file.read_text("utf-8") for file in settings if file.is_file()]
    return frozenset(re.findall(r"--[\w-]+|\w+", "\n".join(texts)))


@functools.cache
def flags() -> frozenset[str]:
    """Return the flags of all commands."""
    program = get_command(app)
    commands = [program, *program.commands.values()]  # type: ignore[attr-defined]
    parameters = [parameter for command in commands for parameter in command.params]
    found = [flag for p in parameters for flag in (*p.opts, *p.secondary_opts)]
    return frozenset((*found, "--help"))


def exists(path: str, name: str | None) -> bool:
    """Return whether there is a file or directory, as written or anywhere in the package, in which
    `name` is defined."""
    found = [place / path for place in PLACES if (place / path).exists()]
    found += PLACES[1].rglob(path.rstrip("/"))
    return any(name is None or re.search(rf"\b(class|def) {name}\b", code_of(f)) for f in found)


@functools.cache
def code_of_owner(owner: str) -> str:
    """Return the modules that define the class `owner`, or are the module or package `owner`."""
    modules = [file for file in MODULES if owner in (file.stem, file.parent.name)]
    return "\n".join(map(code_of, modules + classes().get(owner, [])))


@functools.cache
def classes() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in MODULES:
        for name in re.findall(r"^class (\w+)", code_of(file), re.MULTILINE):
            found.setdefault(name, []).append(file)
    return found


def unknown(span: str) -> Iterator[str]:
    """Yield the names in a span of code that do not exist."""
    if path := PATH.fullmatch(span.removeprefix("./")):
        if not exists(path[0].partition(":")[0], path[3]):
            yield span
        return
    yield from ({*FLAG.findall(span)} - flags()) - words()
    for name in NAME.findall(span):
        if "_" not in name and not ONE_NAME.fullmatch(span):
            continue  # words of a command or of a sentence
        yield from {*filter(None, name.split("."))} - words()
        if (member := MEMBER.fullmatch(name)) is not None:
            code = code_of_owner(member[1])
            if code and not re.search(rf"\b{member[2]}\b", code):
                yield name


def test_names_in_backticks_exist() -> None:
    elsewhere = frozenset[str]().union(*ELSEWHERE.values())
    spans = {
        (file, " ".join(span.split()))
        for file in (*PAGES, *MODULES)
        for text in (STRING if file.suffix == ".py" else ALL).findall(file.read_text("utf-8"))
        for span in SPAN.findall(text)
    }
    assert len(spans) > 1000
    wrong = {(str(file), span): {*unknown(span)} - elsewhere for file, span in spans}
    assert not {where: names for where, names in wrong.items() if names}
