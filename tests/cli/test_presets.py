"""Several models on the command line of serve, and in a file with a table for each."""

import math
from pathlib import Path

import pytest

from mlx_specdec.serve.registry import Registry

from ..support.commands import Run, fails

TABLES = """
[coder]
model = "{model}"
draft-model = "{model}"
aliases = ["gpt-4o", "default"]
temperature = 0.5
num-draft = 3
max-model-len = 64
tool-call-parser = "llama3_json"
greedy = false
stop = ["#"]

["Org/Other"]
model = "{model}"
"""


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> list[Registry]:
    """The registries that serve would have served."""
    found: list[Registry] = []
    monkeypatch.setattr(
        "mlx_specdec.serve.server.serve", lambda registry, *rest, **more: found.append(registry)
    )
    return found


def test_a_file_has_a_table_of_flags_for_each_model(
    run: Run, registries: list[Registry], llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(TABLES.format(model=llama))
    flags = ("--no-cache", "--temperature", 0.9, "--max-waiting", 3, "--prompt-cache-dir", tmp_path)
    assert run("serve", "--models-preset", file, *flags).code == 0
    [registry] = registries
    coder, other = registry.models
    assert (coder.name, coder.aliases) == ("coder", ("gpt-4o", "default"))
    assert (other.name, other.aliases) == ("Org/Other", ())
    assert coder.settings.tool_call_parser == "llama3_json"
    assert (coder.settings.limits.context, other.settings.limits.context) == (64, None)
    size = (llama / "model.safetensors").stat().st_size
    assert (coder.nbytes, other.nbytes) == (2 * size, size)
    # A table wins over the command line.
    (pair, options), (_, plain) = coder.load(), other.load()
    assert pair.draft is not None and options.num_draft == 3 and options.stop == ("#",)
    assert (options.temperature, plain.temperature) == (0.5, 0.9)
    directories = [model.store.directory for model in registry.models]
    assert directories == [tmp_path / "coder", tmp_path / "Org%2FOther"]
    assert coder.store.memory_bytes == other.store.memory_bytes
    assert 2 * coder.store.memory_bytes <= coder.store.memory_bytes * coder.store.parts


def test_several_models_may_be_named(
    run: Run, registries: list[Registry], llama: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    second.symlink_to(llama)
    flags = ("--idle-unload", 5, "--wait-for-model", "--memory-budget", "2GB", "--strict-model")
    assert run("serve", "--model", llama, "--model", second, *flags).code == 0
    assert run("serve", "--model", llama, "--prompt-cache-dir", tmp_path).code == 0
    both, single = registries
    assert [model.name for model in both.models] == [llama.name, "second"]
    assert (both.idle_seconds, both.waits, both.strict) == (300, True, True)
    assert both.memory_budget == 2_000_000_000
    assert (single.idle_seconds, single.waits) == (math.inf, False)
    assert single.first.store.directory == tmp_path and single.first.store.parts == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = 'x", "is not TOML"),
        ("", "has no table"),
        ("model = 'x'", "model must be a table with the flags of a model"),
        ("[a]\ntemperature = 1", "[a]: name the model"),
        ("[a]\nmodel = 'x'\ntemprature = 1", "did you mean temperature?"),
        ("[a]\nmodel = 'x'\nport = 1", "port is no flag of one model"),
        ("[a]\nmodel = 'x'\nmemory-budget = '1GB'", "memory-budget is no flag of one model"),
        ("[a]\nmodel = 'x'\ntemperature = 'hot'", "temperature must be a number, not 'hot'"),
        ("[a]\nmodel = 'x'\ntop-k = true", "top-k must be a whole number, not True"),
        ("[a]\nmodel = 'x'\nexact = 1", "exact must be true or false"),
        ("[a]\nmodel = 'x'\nmax-model-len = 1", "max-model-len must be at least 2"),
        ("[a]\nmodel = 'x'\ndtype = 'int8'", "dtype must be 'auto' or 'float32' or"),
        ("[a]\nmodel = 'x'\naliases = 'b'", "an entry of"),
        ("[a]\nmodel = 'x'\ntool-call-parser = 'lama'", "lama is unknown"),
        ("[a]\nmodel = '{model}'\n[b]\nmodel = '{model}'\naliases = ['a']", "two models are named"),
    ],
)
def test_a_wrong_file_is_reported_in_a_line(
    run: Run, llama: Path, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text.format(model=llama))
    fails(run("serve", "--models-preset", file), said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "b", "--draft-model", "c"), "would be the draft of every model"),
        (("--model", "b", "--distributed", "tensor"), "--distributed serves one model"),
        (("--models-preset", __file__), "leave --model and"),
        (("--distributed", "tensor", "--idle-unload", 1), "leave --distributed out"),
        (("--idle-unload", -1), "'--idle-unload': it must be greater"),
    ],
)
def test_flags_that_are_for_one_model_are_refused(
    run: Run, llama: Path, flags: tuple[object, ...], said: str
) -> None:
    fails(run("serve", "--model", llama, *flags), said)
