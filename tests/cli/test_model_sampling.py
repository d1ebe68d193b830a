"""Sampling settings of generation_config.json: defaults that flags and requests override."""

import io
import json
from pathlib import Path

import pytest

from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.options import Options
from mlx_specdec.serve.registry import Registry

from ..support.commands import Run, fails
from ..support.models import make_llama

PROMPT = "def read(path):"
WARM = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
SAMPLED = {name: value for name, value in WARM.items() if name != "do_sample"}
LINE = (
    "sampling as generation_config.json says: temperature 0.7, top_p 0.8, top_k 20, "
    "repetition_penalty 1.1; --greedy decodes greedily\n"
)


def make(directory: Path, **generation: object) -> Path:
    model = make_llama(directory)
    (model / "generation_config.json").write_text(json.dumps(generation))
    return model


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("warm"), **WARM)


def text(model: Path, **settings: object) -> str:
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
def test_a_text_is_sampled_as_the_model_recommends_unless_a_flag_says_otherwise(
    run: Run, warm: Path, flags: tuple[object, ...], settings: dict[str, float]
) -> None:
    done = run("generate", PROMPT, "--model", warm, "-m", 12, "--no-cache", *flags)
    assert (done.code, done.out) == (0, text(warm, **settings))
    assert (LINE in done.err) == (flags in ((), ("--seed", 3)))
    assert ("generation_config" in done.err) == bool(settings)


@pytest.mark.parametrize("do_sample", [False, None])
def test_a_model_that_does_not_sample_is_decoded_greedily(
    run: Run, tmp_path: Path, do_sample: bool | None
) -> None:
    model = make(tmp_path, **{**WARM, "do_sample": do_sample})
    done = run("generate", PROMPT, "--model", model, "-m", 12, "--no-cache")
    assert done.out == text(model) and "generation_config" not in done.err


def test_the_temperature_is_1_without_one_and_nonsense_is_left_out(tmp_path: Path) -> None:
    said = {"do_sample": True, "top_p": 7, "top_k": None, "min_p": "much", "max_length": 20}
    assert load(make(tmp_path, **said)).sampling == {"temperature": 1.0}


def test_a_chat_samples_as_the_model_recommends(
    run: Run, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for flags in ((), ("--temperature", 0.7), ("--greedy",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("def\n"))
        done = run("chat", "--model", warm, "-m", 12, "--no-cache", "--seed", 2, *flags)
        outputs.append(done.out)
        assert (LINE in done.err) == (not flags)
    assert outputs[0] == outputs[1] != outputs[2]


def test_the_server_takes_them_for_what_a_request_leaves_out(
    run: Run, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults: list[Options] = []

    def serve(registry: Registry, *rest: object, **more: object) -> None:
        defaults.append(registry.first.load()[1])

    monkeypatch.setattr("mlx_specdec.serve.server.serve", serve)
    for flags in ((), ("--top-k", 5), ("--greedy",)):
        assert run("serve", "--model", warm, "--no-cache", *flags).code == 0
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    assert [tuple(getattr(one, name) for name in names) for one in defaults] == [
        (0.7, 0.8, 20, 1.1),
        (0.7, 0.8, 5, 1.1),
        (0, 1, 0, 1),
    ]


def test_greedy_and_a_temperature_contradict_each_other(run: Run) -> None:
    flags = ("--greedy", "--temperature", 0.5)
    fails(run("generate", PROMPT, "--model", "/nowhere", *flags), "leave out --temperature")
