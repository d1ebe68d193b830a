"""One module changes the classes, functions and modules of others, and can undo it."""

import ast
from pathlib import Path

import mlx_specdec

PACKAGE = Path(mlx_specdec.__file__).parent
HOOKS = {
    ("models/patches.py", "sys.modules"),
    ("system.py", "resource.setrlimit"),
    ("models/patches.py", "os.environ"),
    ("cli/app.py", "warnings.showwarning"),
    ("cli/app.py", "setattr(sys, name)"),
}
"""Targets of assignments that are allowed. Python documents that programs replace the last two."""


def changes(text: str) -> list[str]:
    """Return the attributes of imported objects, and the classes, that a module changes."""
    nodes = list(ast.walk(ast.parse(text)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [name for node in imports for name in node.names]
    imported = {(name.asname or name.name).split(".")[0] for name in names}
    found = []

    def foreign(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars":
            return bool(node.args) and foreign(node.args[0])
        return isinstance(node, ast.Name) and node.id in imported

    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "__class__":
            found.append(node.name)
        elif "__globals__" in (getattr(node, "attr", ""), getattr(node, "value", "")):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute | ast.Subscript):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            changed = not isinstance(node.ctx, ast.Load)
            if name in ("pop", "setdefault", "update", "clear"):
                changed = ast.unparse(node.value).endswith(("sys.modules", ".__dict__"))
            if changed and (name == "__class__" or foreign(node)):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            owner, name = node.args[:2]
            if foreign(owner) or ast.unparse(name) == "'__class__'":
                found.append(f"{ast.unparse(node.func)}({ast.unparse(owner)}, {ast.unparse(name)})")
    return found


def test_only_one_module_changes_what_belongs_to_others() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        found = changes(file.read_text(encoding="utf-8"))
        wrong += [
            f"{name}: {change}"
            for change in found
            if not any(name == module and change.startswith(hook) for module, hook in HOOKS)
        ]
    assert wrong == []
