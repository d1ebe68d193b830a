"""The names that the package exports suffice to use it, and help() describes each of them."""

import dataclasses
import inspect
import tomllib
from collections.abc import Iterator

import pytest

import mlx_specdec
from mlx_specdec import SpecdecError

from .support import ROOT

NAMES = mlx_specdec.__all__
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(mlx_specdec, name))]
OUTPUTS = ("CacheSettings", "Options", "Request", "Result", "Statistics", "Step")
"""The classes whose attributes users read or write."""


def documentation(exported: object) -> str:
    return inspect.getdoc(exported) or ""


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_docstring_of_its_own(name: str) -> None:
    exported = getattr(mlx_specdec, name)
    text = vars(exported).get("__doc__") if inspect.isclass(exported) else exported.__doc__
    # The decorator `dataclass` writes the signature where there is no docstring.
    assert text and not text.startswith(f"{name}(")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "convert"])
def test_a_docstring_names_every_argument_and_what_is_returned(name: str) -> None:
    function = getattr(mlx_specdec, name)
    described = documentation(function).partition("Args:\n")[2].partition("Returns:\n")
    for argument in inspect.signature(function).parameters:
        assert any(argument in line.split(":")[0] for line in described[0].splitlines())
    assert described[1]


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_docstring_names_every_attribute(name: str) -> None:
    kind = getattr(mlx_specdec, name)
    described = documentation(kind).partition("Attributes:\n")[2].splitlines()
    names = {name.strip() for line in described for name in line.split(":")[0].split(",")}
    assert {entry.name for entry in dataclasses.fields(kind) if entry.name[0] != "_"} <= names


def kinds_of(error: type[SpecdecError]) -> Iterator[type[SpecdecError]]:
    """Yield an error and all errors of the package that inherit from it."""
    yield error
    for kind in error.__subclasses__():
        if kind.__module__.startswith("mlx_specdec"):
            yield from kinds_of(kind)


def test_every_error_is_exported() -> None:
    kinds = [*kinds_of(SpecdecError)]
    assert len(kinds) == 10
    for kind in kinds:
        assert getattr(mlx_specdec, kind.__name__) is kind and kind.__name__ in NAMES


def test_the_example_of_generate_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    example = documentation(mlx_specdec.generate).partition("Example:\n")[2]
    exec(inspect.cleandoc(example))
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("name", "instead"),
    [("Emission", "iterate for Steps"), ("Labels", "read Result.labels"), ("Rule", "Options.rule")],
)
def test_a_removed_name_says_what_to_use_instead(name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=rf"mlx_specdec.{name} was removed in .*: .*{instead}"):
        exec(f"from mlx_specdec import {name}")


def test_the_wheel_brings_what_the_defaults_name() -> None:
    """What is in weights/ and prompts/ of a clone is found inside an installed package."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"mlx_specdec", "weights/t5-enfr", "weights/t5-enfr-draft"}
    assert needed | {"prompts/translation.jsonl"} <= set(wheel["only-include"])
    assert all((ROOT / name).exists() for name in wheel["only-include"])
    assert wheel["sources"] == {name: f"mlx_specdec/{name}" for name in ("weights", "prompts")}
