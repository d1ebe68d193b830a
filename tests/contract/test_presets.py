"""A file with a table of flags for each served model, and the sampling that models recommend."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from .support import Server, checkpoint, command, served

PROMPT = "def read(path):"
WARM = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
SAMPLED: dict[str, Any] = {name: value for name, value in WARM.items() if name != "do_sample"}
LINE = (
    "sampling as generation_config.json says: temperature 0.7, top_p 0.8, top_k 20, "
    "repetition_penalty 1.1; --greedy decodes greedily\n"
)
TABLES = """
[coder]
model = "{llama}"
draft-model = "{llama}"
aliases = ["gpt-4o", "default"]
temperature = 0.5
num-draft = 3
max-model-len = 64
tool-call-parser = "llama3_json"
greedy = false
stop = ["#"]

["Org/Other"]
model = "{llama}"

[warm]
model = "{warm}"

[cold]
model = "{warm}"
greedy = true
"""


def recommends(directory: Path, **sampling: object) -> Path:
    checkpoint(directory)
    (directory / "generation_config.json").write_text(json.dumps(sampling))
    return directory


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recommends(tmp_path_factory.mktemp("warm"), **WARM)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def server(llama: Path, warm: Path, kept: Path) -> Iterator[Server]:
    file = kept.parent / "models.toml"
    file.write_text(TABLES.format(llama=llama, warm=warm))
    flags = ("--no-cost-cache", "--prompt-cache-dir", kept, "--top-p", 0.9)
    with served("--models-preset", file, *flags) as running:
        yield running


def test_each_table_is_a_model_with_flags_of_its_own(
    server: Server, kept: Path, llama: Path
) -> None:
    for name, answers in (("gpt-4o", "coder"), ("default", "coder"), ("Org/Other", "Org/Other")):
        body = {"model": name, "prompt": PROMPT, "max_tokens": 2}
        assert server.ok("/v1/completions", **body)["model"] == answers
    models = server.get("/v1/models").json["data"]
    assert [model["id"] for model in models] == ["coder", "Org/Other", "warm", "cold"]
    assert [model["max_model_len"] for model in models[:2]] == [64, 4096]
    assert models[0]["meta"]["size"] == 2 * models[1]["meta"]["size"] > 0
    props = server.get("/props?model=coder").json
    assert (props["num_draft"], props["has_draft_model"]) == (3, True)
    assert {"coder", "Org%2FOther"} <= {place.name for place in kept.iterdir()}
    # The table has a stop string, which the model alone would write.
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "top_p": 1}
    body["logit_bias"] = {str(load(llama).tokenizer.encode("#")[-1]): 5}
    texts = [
        server.ok("/v1/completions", **body, model=model)["choices"][0]["text"]
        for model in ("coder", "Org/Other")
    ]
    assert texts[1].count("#") and texts[0] == texts[1].partition("#")[0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("coder", (0.5, 0.9, 0)),
        ("Org/Other", (0, 0.9, 0)),
        ("warm", (0.7, 0.9, 20)),
        ("cold", (0, 0.9, 0)),
    ],
)
def test_a_table_wins_over_the_command_line_and_this_over_what_a_model_recommends(
    server: Server, name: str, settings: tuple[float, ...]
) -> None:
    server.ok("/v1/completions", model=name, prompt=PROMPT, max_tokens=1)
    found = server.get(f"/props?model={name}").json["default_generation_settings"]
    assert tuple(found[one] for one in ("temperature", "top_p", "top_k")) == settings


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
        ("[a]\nmodel = '{llama}'\n[b]\nmodel = '{llama}'\naliases = ['a']", "two models are named"),
    ],
)
def test_a_wrong_file_is_reported_in_a_line(
    llama: Path, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text.format(llama=llama))
    command("serve", "--models-preset", file).refuses(said)


# What generate, chat and load do with generation_config.json.


def alone(model: Path, **settings: Any) -> str:
    options = Options(max_tokens=12, regular=True, **settings)
    return generate(load(model), PROMPT, options).text + "\n"


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((), SAMPLED),
        (("--seed", 3), {**SAMPLED, "seed": 3}),
        (("--top-p", 0.5), {**SAMPLED, "top_p": 0.5}),
        (("--temperature", 0), {**SAMPLED, "temperature": 0}),
        (("--greedy",), {}),
    ],
)
def test_a_completion_is_sampled_as_the_model_recommends_unless_a_flag_says_otherwise(
    warm: Path, flags: tuple[object, ...], settings: dict[str, Any]
) -> None:
    done = command("generate", PROMPT, "--model", warm, "-m", 12, "--no-cost-cache", *flags)
    assert (done.code, done.out) == (0, alone(warm, **settings))
    assert (LINE in done.err) == (flags in ((), ("--seed", 3)))
    assert ("generation_config" in done.err) == bool(settings)


def test_the_temperature_is_1_without_one_and_nonsense_is_left_out(tmp_path: Path) -> None:
    said = {"do_sample": True, "top_p": 7, "top_k": None, "min_p": "much", "max_length": 20}
    model = recommends(tmp_path, **said)
    done = command("generate", PROMPT, "--model", model, "-m", 12, "--no-cost-cache")
    assert done.out == alone(model, temperature=1.0)
    assert "sampling as generation_config.json says: temperature 1; --greedy" in done.err
