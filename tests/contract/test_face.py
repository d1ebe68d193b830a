"""The contract uses nothing of the package but its public face."""

import ast
from collections.abc import Iterator
from pathlib import Path

import mlx_specdec

FACE = {
    *("load", "generate", "stream_generate", "generate_many", "stream_many", "convert"),
    *("Options", "Request", "Result", "Step", "Statistics"),
    *("SpecdecError", "OptionError", "SourceError", "CheckpointError", "OutputError"),
    *("PromptError", "DocumentError", "VocabularyError", "DecodingError", "RewindError"),
    *("PromptCache", "CacheSettings", "Thoughts", "Proposer", "Proposal"),
}
INNER = "mlx_specdec.inner"
"""Stands for a name that the package does not promise."""
HERE = Path(__file__).parent
TESTS = HERE.parent


def imported(file: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield what a file imports: a dotted name, and the file of the tests that has it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "mlx_specdec":
            public = ("mlx_specdec" if alias.name in FACE else INNER for alias in node.names)
            yield from ((name, None) for name in public)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or "", None
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for path in (base, *(base / alias.name for alias in node.names)):
                if path.with_suffix(".py").is_file():
                    yield path.name, path.with_suffix(".py")


def inner_imports(file: Path, seen: set[Path]) -> list[str]:
    """Return the inner modules of the package that a file or its support modules import."""
    if file in seen:
        return []
    seen.add(file)
    found = []
    for name, path in imported(file):
        if name.startswith("mlx_specdec."):
            found.append(f"{file.relative_to(TESTS)} imports {name}")
        elif path is not None:
            found += inner_imports(path, seen)
    return found


def test_the_contract_imports_only_the_public_face() -> None:
    seen: set[Path] = set()
    assert [line for file in sorted(HERE.rglob("*.py")) for line in inner_imports(file, seen)] == []
    assert TESTS / "support" / "tiny.py" in seen


def test_the_package_promises_these_names() -> None:
    assert set(mlx_specdec.__all__) == FACE


def test_an_inner_import_of_a_support_module_is_noticed() -> None:
    assert inner_imports(TESTS / "support" / "pairs.py", set())
