"""transformers as a baseline, with a stand-in for it: what it is asked, and what is counted."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator

from benchmarks import compare
from benchmarks.compare import (
    NoBaselineError,
    build,
    find_baselines,
    mlx_lm_file_methods,
    settings,
    transformers_file_methods,
    transformers_methods,
    weights,
)
from mlx_specdec.checkpoints import files
from mlx_specdec.core.options import Options
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import PromptError
from mlx_specdec.models.loading import load_model

from ..support.fake_hugging_face import FakeHuggingFace, FakeModel
from ..support.models import make_llama, make_t5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pair(llama: Path) -> Pair:
    return load(llama, llama, dtype="float32")


def fake_for(pair: Pair, count: int = 2) -> tuple[FakeHuggingFace, list[FakeModel]]:
    target: Any = pair.target
    models = [FakeModel(shapes(weights(target.network))) for _ in range(count)]
    return FakeHuggingFace(*models), models


def test_plain_and_every_fixed_length_are_methods_on_the_same_weights(pair: Pair) -> None:
    fake, (target, draft) = fake_for(pair)
    methods = transformers_methods(pair, Options(), [1, 4, "auto"], fake.installed)
    assert [(one.name, one.num_draft, one.same_text) for one in methods] == [
        ("transformers plain", 0, True),
        ("transformers 1", 1, True),
        ("transformers 4", 4, True),
    ]
    for method in methods:
        method.run([3, 4])
    plain, _, assisted = target.calls[-3:]
    assert "assistant_model" not in plain and assisted["assistant_model"] is draft
    assert assisted["tokens"].tolist() == [[3, 4]]
    drafting = draft.generation_config
    assert drafting.num_assistant_tokens == 4 and drafting.assistant_confidence_threshold == 0
    assert drafting.num_assistant_tokens_schedule == "constant"
    assert set(fake.threads) == {2} and set(fake.seeds) == {0}


def test_a_text_ends_where_ours_does(pair: Pair) -> None:
    fake, (target, _) = fake_for(pair)
    longest = pair.target.max_length
    assert longest is not None
    run = transformers_methods(pair, Options(max_tokens=50), [], fake.installed)[0].run
    run([3] * (longest - 20))
    settings = target.calls[-1]["generation_config"]
    assert settings.max_new_tokens == 20
    assert settings.eos_token_id == sorted(pair.eos_token_ids)
    with pytest.raises(PromptError, match="takes"):
        run([3] * longest)


def test_transformers_gets_texts_of_like_length_in_one_call(pair: Pair) -> None:
    fake, (target, _) = fake_for(pair)
    methods = transformers_file_methods(pair, Options(), [1, 2], fake.installed)
    assert [(one.name, one.batch_size) for one in methods] == [
        ("transformers plain", 1),
        ("transformers plain", 2),
    ]
    assert all(one.same_text for one in methods)
    target.calls.clear()
    target.says = [[5, 6], [sorted(pair.eos_token_ids)[0], 7]]
    made = dict(methods[1].run([[3], [4, 5, 6], [8, 9]]))
    pad = target.calls[0]["generation_config"].pad_token_id
    assert [call["tokens"].tolist() for call in target.calls] == [
        [[4, 5, 6], [pad, 8, 9]],
        [[3]],
    ]
    assert target.calls[0]["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    # Behind an EOS is padding.
    assert [made[number].tokens for number in range(3)] == [(5, 6, *sorted(pair.eos_token_ids))] * 3
    assert set(fake.threads) == {2}


def test_sources_of_a_translator_are_padded_on_the_right(tmp_path: Path) -> None:
    pair = load(make_t5(tmp_path), dtype="float32")
    fake, (target,) = fake_for(pair, 1)
    target.decoder_only = False
    target.says = [[5, 6]]
    [method] = transformers_file_methods(pair, Options(), [3], fake.installed)
    made = dict(method.run([[3], [4, 5]]))
    pad = target.calls[-1]["generation_config"].pad_token_id
    assert target.calls[-1]["tokens"].tolist() == [[4, 5], [3, pad]]
    assert target.calls[-1]["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert [made[number].tokens for number in range(2)] == [(5, 6)] * 2


@pytest.mark.parametrize("program", ["mlx-lm", "transformers"])
def test_a_program_that_cannot_batch_a_model_is_left_out_with_its_reason(
    pair: Pair, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, (target, _) = fake_for(pair)

    def refuse(*arguments: Any, **fields: Any) -> None:
        raise ValueError("no batches here\nbecause")

    if program == "transformers":
        target.generate = refuse  # type: ignore[method-assign]
    else:
        monkeypatch.setattr(BatchGenerator, "insert", refuse)
    monkeypatch.setattr(compare, "hugging_face", lambda: fake.installed)
    programs = mlx_lm_file_methods, transformers_file_methods
    methods, notes = find_baselines(*programs, pair, Options(), [2])
    rest = {"mlx-lm", "transformers"} - {program}
    assert {one.family for one in methods} == rest
    assert f"{program} is left out: it cannot generate: no batches here" in notes


# Our networks' weights under the checkpoints' names; real files, no torch.


FIXTURES = Path(__file__).parents[1] / "fixtures"


def network(name: str, **fields: int):
    return load_model(FIXTURES / name, dtype="float32", **fields).model.network


def stored(name: str) -> dict[str, np.ndarray]:
    read = mx.load(str(FIXTURES / name / "model.safetensors"))
    return {key: np.array(array.astype(mx.float32)) for key, array in read.items()}


def shapes(arrays: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


@pytest.mark.parametrize(
    "name", ["t5/own-head-scaled", "t5/tied-unscaled", "t5/umt5-untied", "torch/llama"]
)
def test_weights_have_the_names_and_values_that_transformers_saved(name: str) -> None:
    found, saved = weights(network(name)), stored(name)
    assert found.keys() == saved.keys()
    assert all(np.array_equal(found[key], saved[key]) for key in found)


def test_packed_weights_come_unpacked() -> None:
    found, saved = weights(network("torch/llama", q_bits=8, q_group_size=32)), stored("torch/llama")
    assert shapes(found) == shapes(saved)
    assert all(array.dtype == np.float32 for array in found.values())
    for key, array in found.items():
        assert np.abs(array - saved[key]).max() < 0.02 * np.abs(saved[key]).max()


@pytest.mark.parametrize(
    ("name", "scales"), [("own-head-scaled", True), ("tied-unscaled", False), ("mt5", False)]
)
def test_the_scaling_is_said_where_transformers_looks_for_it(name: str, scales: bool) -> None:
    config = {
        **files.read_config(FIXTURES / "t5" / name),
        "quantization": {"bits": 4, "group_size": 64},
        "auto_map": {"AutoModel": "code.Model"},
    }
    report = settings(config, network(f"t5/{name}"))
    assert report["tie_word_embeddings"] is scales
    assert not report.keys() & {"quantization", "auto_map", "scale_decoder_outputs"}


@pytest.mark.parametrize("change", ["missing", "strange", "shape"])
def test_other_tensors_than_ours_are_refused_by_name(change: str) -> None:
    llama = network("torch/llama")
    tensors = shapes(weights(llama))
    norm = tensors.pop("model.norm.weight")
    if change != "missing":
        tensors["model.norm.weight"] = norm if change == "strange" else (3,)
    if change == "strange":
        tensors["model.more.weight"] = norm
    fake = FakeHuggingFace(FakeModel(tensors))
    with pytest.raises(NoBaselineError, match=r"model\.(norm|more)\.weight"):
        build(fake.installed, files.read_config(FIXTURES / "torch/llama"), llama)
