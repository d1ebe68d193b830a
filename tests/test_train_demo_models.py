"""The training script runs end to end on a handful of lines, and goes on after an interruption."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
WORDS = ["tea", "milk", "bread", "salt", "fish", "snow", "rain", "wind", "night", "morning"]


def script(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train_demo_models.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.tsv"
    lines = [f"I like {a} and {b}.\tJ'aime {b} et {a}." for a in WORDS for b in WORDS]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_a_translation_pair_is_trained_resumed_and_evaluated(
    tmp_path: Path, sentences: Path
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    small = ("--width", "64", "--layers", "1", "--decoder-layers", "2", "--data", sentences)
    script("translation-target", "--output", target, "--steps", "3", *small)
    again = ("--start", target, "--decoder-layers", "4", "--data", sentences)
    script("translation-target", "--output", tmp_path / "grown", "--steps", "2", *again)
    grown = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert grown["num_decoder_layers"] == 4
    teacher = ("--teacher", target, "--data", sentences, "--generated", "20")
    script("translation-draft", "--output", draft, "--steps", "3", *teacher)
    assert json.loads((draft / "config.json").read_text())["num_decoder_layers"] == 1
    again = ("--start", draft, "--teacher", tmp_path / "grown", "--data", sentences)
    script("translation-draft", "--output", draft, "--steps", "1", *again, "--generated", "20")
    assert not list(tmp_path.rglob("training-state.pt"))
    asked = ("--model", target, "--draft", draft, "--data", sentences, "--limit", "8")
    figures = json.loads(script("evaluate-translation", *asked))
    assert figures["sentences"] == 8 and 0 <= figures["alpha"] <= 1


def test_growing_a_decoder_does_not_change_its_function(tmp_path: Path, sentences: Path) -> None:
    import torch
    from transformers import T5ForConditionalGeneration

    target = tmp_path / "target"
    small = ("--width", "64", "--layers", "1", "--decoder-layers", "2", "--data", sentences)
    script("translation-target", "--output", target, "--steps", "2", *small)
    again = ("--start", target, "--decoder-layers", "6", "--data", sentences)
    script("translation-target", "--output", tmp_path / "grown", "--steps", "0", *again)
    ids = torch.arange(2, 12)[None]
    logits = [
        T5ForConditionalGeneration.from_pretrained(path)
        .eval()(input_ids=ids, decoder_input_ids=ids)
        .logits
        for path in (target, tmp_path / "grown")
    ]
    assert torch.allclose(*logits, atol=1e-5)


def test_a_python_pair_is_trained_and_evaluated(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for index, word in enumerate(WORDS):
        body = "\n".join(f"def {word}_{n}(a, b):\n    return a + {n} * b" for n in range(60))
        (library / f"module_{index}.py").write_text(body)
    target, draft = tmp_path / "target", tmp_path / "draft"
    small = ("--library", library, "--width", "64", "--layers", "2")
    script("python-target", "--output", target, "--steps", "2", *small)
    script(
        "python-draft", "--output", draft, "--steps", "2", "--teacher", target, "--library", library
    )
    asked = ("--model", target, "--draft", draft, "--library", library, "--limit", "2")
    assert 0 <= json.loads(script("evaluate-python", *asked))["alpha"] <= 1


def test_an_interrupted_training_goes_on_from_its_state(tmp_path: Path) -> None:
    import torch

    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from demo_training.optimise import Budget, train
    finally:
        sys.path.pop(0)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    model, wanted = torch.nn.Linear(8, 8, bias=False), inputs.flip(1)
    seen: list[float] = []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        value = ((model(batch) - wanted) ** 2).mean()
        seen.append(value.item())
        return value

    def epochs(number: int):
        yield from [inputs] * 5

    state = tmp_path / "state.pt"
    arguments = {"rate": 0.2, "state": state}
    assert train(model, epochs, loss, budget=Budget(steps=200), **arguments) == 200
    with torch.no_grad():
        model.weight.zero_()
    first = len(seen)
    assert train(model, epochs, loss, budget=Budget(steps=220), **arguments) == 220
    assert len(seen) == first + 20
    assert seen[first] < 0.5 * seen[0]


def test_a_cut_off_translation_training_goes_on_when_the_command_is_given_again(
    tmp_path: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from demo_training import translation
    from demo_training.optimise import Budget

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    output = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(translation, "finish", cut_off)
        with pytest.raises(KeyboardInterrupt):
            translation.train_target(
                data=sentences,
                start=None,
                output=output,
                decoder_layers=2,
                width=64,
                layers=1,
                rate=1.2e-3,
                budget=Budget(steps=3),
                seed=0,
            )
    state = torch.load(output / "training-state.pt", weights_only=True)
    assert state["progress"][0] == 3 and not (output / "model.safetensors").exists()

    tokenizer = (output / "tokenizer.json").stat().st_mtime_ns
    small = ("--width", "64", "--layers", "1", "--decoder-layers", "2", "--data", sentences)
    script("translation-target", "--output", output, "--steps", "3", *small)
    assert (output / "tokenizer.json").stat().st_mtime_ns == tokenizer
    written = load_file(output / "model.safetensors")
    assert torch.equal(written["shared.weight"], state["weights"][0])
    assert not (output / "training-state.pt").exists()


def test_a_limited_evaluation_is_not_of_the_first_lines_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from demo_training.evaluate import sampled

    by_length = ["x" * length for length in range(1, 101)]
    some = sampled(by_length, 40)
    assert len(set(some)) == 40 and some == sampled(by_length, 40)
    assert abs(sum(map(len, some)) / 40 - 50.5) < 10
    assert sampled(by_length, 100) == by_length


def test_a_draft_that_goes_on_keeps_the_new_teachers_embeddings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from demo_training.translation import one_layer_draft, take_decoder
    from transformers import T5Config, T5ForConditionalGeneration

    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    shape = T5Config(d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1, vocab_size=20)
    shape.num_decoder_layers = 2
    teacher, older = (T5ForConditionalGeneration(shape) for _ in range(2))
    draft, earlier = one_layer_draft(teacher), one_layer_draft(older)
    take_decoder(draft, earlier)
    assert torch.equal(draft.shared.weight, teacher.shared.weight)
    assert torch.equal(draft.decoder.embed_tokens.weight, teacher.shared.weight)
    query = "block.0.layer.0.SelfAttention.q.weight"
    assert torch.equal(draft.decoder.state_dict()[query], earlier.decoder.state_dict()[query])
