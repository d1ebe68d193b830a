"""Imports follow the data: no room imports one above it, nothing imports in a circle, and the front
stays light. Imports for types alone and those inside of functions count too."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import mlx_specdec

PACKAGE = Path(mlx_specdec.__file__).parent
ROOMS = (
    "version",
    "errors",
    "system",
    "largest",
    "types",
    "results",
    "checkpoints",
    "text",
    "models",
    "conversion",
    "core",
    "proposers",
    "engine",
    "",
    "training",
    "measure",
    "serve",
    "llm_plugin",
    "cli",
    "__main__",
)
"""From the bottom to the top. A room imports those before it."""
BESIDE = {("measure", "training"), ("serve", "training"), ("serve", "measure")}
"""Rooms that the order would allow and that know nothing of one another."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; the package's front, which only exports, has
    none."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that a module imports anywhere in its text."""
    file = modules()[module]
    parents = file.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and (name := _named_module(node)).startswith("."):
            tail = name.lstrip(".")
            level, names = len(name) - len(tail), [""]
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            level, tail = node.level, node.module
            names = [alias.name for alias in node.names]
        else:
            continue
        base = ".".join([*parents[: len(parents) - (level - 1)], *filter(None, [tail])])
        for name in names:
            full_name = f"{base}.{name}".strip(".")
            found.add(full_name if full_name in modules() else base)
    return frozenset(found - {module})


def _named_module(call: ast.Call) -> str:
    """The module that a call of import_module names with a literal; "" for other calls."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    literal = [argument.value for argument in call.args[:1] if isinstance(argument, ast.Constant)]
    return literal[0] if name == "import_module" and literal else ""


def test_imports_by_a_literal_name_count() -> None:
    assert "system" in imports("")


def test_no_room_imports_one_above_it() -> None:
    wrong = []
    for module in modules():
        here = module.split(".")[0]
        for imported in sorted(imports(module)):
            there = imported.split(".")[0]
            if ROOMS.index(there) > ROOMS.index(here) or (here, there) in BESIDE:
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_no_command_but_serve_imports_the_server() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in modules()
        if module.startswith("cli") and module != "cli.serve"
        for imported in sorted(imports(module))
        if imported.split(".")[0] == "serve"
    ]
    assert wrong == [] and "serve.server" in imports("cli.serve")


def test_training_is_a_leaf() -> None:
    """It uses the public names, the class of what `load` returns, models and their files, the
    report of a conversion, which its results have too, and the reader of prompt files. The types
    that models share are in types."""
    allowed = ("", "conversion.report", "engine.pair", "system", "types", "core.options")
    allowed += ("text.prompts",)
    wrong = [
        f"{module} imports {imported}"
        for module in modules()
        if module.startswith("training")
        for imported in sorted(imports(module))
        if imported not in allowed
        and imported.split(".")[0] not in ("checkpoints", "models", "training")
    ]
    assert wrong == []


HOOKS = {
    "how weights are divided": {
        *("engine.loading", "models.loading", "models.base", "models.t5"),
        *("models.mlx_lm.family", "models.mlx_lm.model", "models.mlx_lm.network"),
    },
    "what rank 0 alone decides": {
        *("models.mlx_lm.trials", "cli.loading", "cli.launch"),
    },
    "whether a rank was lost": {"cli.app", "engine.scheduler", "serve.engine"},
}
"""The places outside of models/distributed that know that several machines may share a target."""


def test_clusters_have_three_hooks() -> None:
    found = set()
    for module, file in modules().items():
        if module.startswith("models.distributed"):
            continue
        text = file.read_text(encoding="utf-8")
        imported = any(name.startswith("models.distributed") for name in imports(module))
        if imported or "mx.distributed" in text or ".target.lost" in text:
            found.add(module)
    assert found == set().union(*HOOKS.values())


def test_no_module_imports_itself_through_others() -> None:
    done: set[str] = set()
    circles = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for imported in sorted(imports(module)):
                visit(imported, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())
    assert circles == []


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
        "from mlx_specdec.cli.app import generate, main\n"
        "sys.argv = ['main.py', '--help']\n"
        "try:\n    main(generate)\n"
        "except SystemExit as done:\n    assert done.code == 0\n"
        "heavy = {'mlx.core', 'mlx_lm', 'transformers', 'fastapi', 'pydantic'}\n"
        "assert not heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
