"""What is used of other packages that they do not document may go with any release of theirs."""

import ast
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRIVATE = {
    "mlx_lm.tokenizer_utils._infer_thinking",
    "mlx_lm.tokenizer_utils._infer_tool_parser",
    "mlx_lm.utils._get_classes",
}
"""All that is used, but for the attribute `_idx` of mlx-lm's caches."""
NOT_DOCUMENTED = {
    "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE",
    "huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE",
    "huggingface_hub.file_download.http_get",
    "huggingface_hub.utils.WeakFileLock",
    "uvicorn.protocols.http.h11_impl.H11Protocol.on_response_complete",
}
BOUNDED = ("mlx-lm", "huggingface-hub", "uvicorn")
OTHERS = (
    "fastapi",
    "huggingface_hub",
    "mlx",
    "mlx_lm",
    "pydantic",
    "starlette",
    "typer",
    "uvicorn",
)


def used_private_names() -> set[str]:
    """Names of other packages with an underscore that the package imports, or reads of a module
    that it imports."""
    used = set()
    for file in (ROOT / "mlx_specdec").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        modules = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and not node.level:
                for imported in node.names:
                    modules[imported.asname or imported.name] = f"{node.module}.{imported.name}"
            elif isinstance(node, ast.Import):
                modules |= {
                    imported.asname or imported.name: imported.name for imported in node.names
                }
        read = {
            f"{modules[node.value.id]}.{node.attr}"
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if node.value.id in modules
        }
        for name in {*modules.values(), *read}:
            private = any(part[:1] == "_" != part[1:2] for part in name.split("."))
            if private and name.split(".")[0] in OTHERS:
                used.add(name)
    return used


def test_no_other_private_names_are_used() -> None:
    assert used_private_names() == PRIVATE


@pytest.mark.parametrize("name", sorted(PRIVATE | NOT_DOCUMENTED))
def test_what_is_used_is_there(name: str) -> None:
    if name.startswith("uvicorn"):
        pytest.importorskip("uvicorn", reason="the extra server is not installed")
    module, *attributes = name.rsplit(".", 2 if "H11Protocol" in name else 1)
    held = import_module(module)
    for attribute in attributes:
        held = getattr(held, attribute)


def test_the_versions_of_such_packages_are_bounded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    for name in BOUNDED:
        [requirement] = [
            requirement for requirement in wanted if requirement.startswith(name + ">")
        ]
        assert ",<" in requirement
