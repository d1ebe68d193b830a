"""Imports follow the data: no package imports against the stream, and the front stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mlx_specdec

PACKAGE = Path(mlx_specdec.__file__).parent
MAY_IMPORT = {
    "errors": set(),
    "blas": {"errors"},
    "kept": set(),
    "contracts": {"kept"},
    "prompt_cache": {"checkpoints", "contracts", "errors", "kept", "models", "pair", "user_cache"},
    "sampling": {"contracts", "errors"},
    "options": {"drafting", "errors", "sampling"},
    "cache_settings": {"errors"},
    "threads": set(),
    "text": {"checkpoints", "errors"},
    "checkpoints": {"errors"},
    "models": {
        "cache_settings",
        "contracts",
        "checkpoints",
        "text",
        "errors",
        "user_cache",
        "kept",
    },
    "user_cache": set(),
    "drafting": {"contracts", "sampling", "user_cache", "kept"},
    "verification": {"contracts", "sampling"},
    "costs": {"contracts", "user_cache"},
    "ranks": {"contracts", "errors", "kept", "models"},
    "decoding": {"contracts", "costs", "sampling", "text", "threads", "errors", "kept"},
    "pair": {
        "contracts",
        "drafting",
        "errors",
        "models",
        "sampling",
        "text",
    },
    "loading": {
        "cache_settings",
        "checkpoints",
        "contracts",
        "drafting",
        "errors",
        "models",
        "options",
        "pair",
        "ranks",
        "text",
        "threads",
    },
    "prepare": {"errors", "models", "options", "pair", "text"},
    "drafters": {"blas", "contracts", "costs", "decoding", "drafting", "errors", "options", "pair"},
    "shadow": {"contracts", "decoding", "drafting", "models", "pair"},
    "assemble": {
        "blas",
        "contracts",
        "decoding",
        "drafters",
        "drafting",
        "errors",
        "models",
        "options",
        "loading",
        "pair",
        "prepare",
        "sampling",
        "shadow",
        "text",
        "verification",
        "kept",
        "prompt_cache",
    },
    "calibration": {
        "assemble",
        "contracts",
        "costs",
        "decoding",
        "drafters",
        "errors",
        "options",
        "pair",
    },
    "many": {
        "prepare",
        "contracts",
        "assemble",
        "checkpoints",
        "decoding",
        "drafters",
        "drafting",
        "errors",
        "models",
        "options",
        "sampling",
        "kept",
        "prompt_cache",
        "text",
    },
    "batch": {"decoding", "errors", "many", "options", "pair", "text"},
    "serve": {
        "prepare",
        "assemble",
        "decoding",
        "drafting",
        "errors",
        "many",
        "models",
        "options",
        "pair",
        "sampling",
        "text",
        "threads",
        "prompt_cache",
    },
    "compare_models": {"checkpoints", "errors", "models", "text"},
    "training": {
        "assemble",
        "checkpoints",
        "contracts",
        "decoding",
        "errors",
        "many",
        "models",
        "options",
        "prepare",
        "prompt_cache",
        "sampling",
        "text",
    },
    "estimate": {
        "loading",
        "assemble",
        "checkpoints",
        "contracts",
        "costs",
        "errors",
        "models",
        "options",
        "pair",
    },
    "bench": {
        "prepare",
        "assemble",
        "blas",
        "checkpoints",
        "contracts",
        "costs",
        "decoding",
        "drafters",
        "drafting",
        "errors",
        "many",
        "models",
        "options",
        "text",
    },
    "__main__": {"cli"},
    "cli": {
        "prepare",
        "training",
        "assemble",
        "batch",
        "bench",
        "blas",
        "calibration",
        "checkpoints",
        "contracts",
        "costs",
        "decoding",
        "errors",
        "drafters",
        "estimate",
        "compare_models",
        "options",
        "cache_settings",
        "ranks",
        "serve",
        "sampling",
        "text",
        "user_cache",
        "prompt_cache",
    },
}


def imported_parts(file: Path) -> set[str]:
    """Which parts of the package a file imports, by top-level name."""
    parents = file.relative_to(PACKAGE).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = parents[: len(parents) - (node.level - 1)]
        if base:
            found.add(base[0])
        elif node.module:
            found.add(node.module.split(".")[0])
        else:
            found.update(name.name for name in node.names)
    return found - {"__version__"}


def test_no_import_goes_against_the_stream() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        relative = file.relative_to(PACKAGE)
        part = relative.parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        extra = imported_parts(file) - MAY_IMPORT[part] - {part}
        wrong += [f"{relative} imports {name}" for name in sorted(extra)]
    assert wrong == []


def test_every_exported_name_exists_and_nothing_heavy_is_imported_for_the_list() -> None:
    script = (
        "import sys, mlx_specdec as m\n"
        "assert 'mlx.core' not in sys.modules\n"
        "m.Options, m.SpecdecError\n"
        "assert 'mlx.core' not in sys.modules\n"
        "assert [getattr(m, name) for name in m.__all__]\n"
        "assert set(m.__all__) <= set(dir(m))\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules\n"
        "assert 'mlx_lm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_imports_no_mlx() -> None:
    script = (
        "import sys\n"
        "from mlx_specdec.cli.app import generate, run_one\n"
        "sys.argv = ['main.py', '--help']\n"
        "try:\n    run_one(generate)\n"
        "except SystemExit as done:\n    assert done.code == 0\n"
        "assert not {'mlx.core', 'mlx_lm', 'transformers', 'starlette'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
