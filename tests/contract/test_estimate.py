"""`estimate` computes what a pair takes from config.json and the headers of the weights."""

import json
from pathlib import Path

import pytest

from .support import ROOT, checkpoint, command

SHIPPED = ("--model", ROOT / "weights/py-llama", "--draft-model", ROOT / "weights/py-llama-draft")
WEIGHTS = 10**12


def huge(directory: Path) -> Path:
    """Write a model of 100 layers, whose file has a header and a hole."""
    checkpoint(directory, num_hidden_layers=100, num_key_value_heads=8, head_dim=128)
    nbytes, tensors = 4 * WEIGHTS // 100, {}
    for number in range(100):
        ends = [number * nbytes, (number + 1) * nbytes]
        place = {"dtype": "F32", "shape": [78_125, 128_000], "data_offsets": ends}
        tensors[f"model.layers.{number}.mlp.up_proj.weight"] = place
    header = json.dumps(tensors).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * WEIGHTS)
    return directory


@pytest.mark.parametrize(
    # A matrix of 4 bits has a scale and a bias in 16 bits for each 64 weights.
    ("bits", "size"),
    [((), 2 * WEIGHTS), (("--q-bits", 4), WEIGHTS * (4 + 2 * 16 / 64) / 8)],
)
def test_a_pair_that_does_not_fit_gets_its_sizes_and_no_speed(
    tmp_path: Path, bits: tuple[object, ...], size: int
) -> None:
    target, draft = huge(tmp_path / "huge"), checkpoint(tmp_path / "draft")
    words = ("estimate", "--model", target, "--draft-model", draft, "--prompt-tokens", 872)
    words = (*words, "--dtype", "bfloat16", *bits)
    done = command(*words, "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["target"]["weights_bytes"] == pytest.approx(size, rel=0.01)
    # Keys and values of 8 heads of width 128 in 100 layers, for the prompt and 128 tokens more.
    assert found["target"]["caches_bytes"] == 100 * 2 * 8 * 128 * 2 * 1000
    assert found["target"]["dtype"] == "4-bit, bfloat16" if bits else "bfloat16"
    assert (found["fits"], found["speeds"], found["prompt_tokens"]) == (False, None, 872)
    shown = command(*words)
    assert "NO: it would not fit" in shown.out and "speedup" not in shown.out


def test_a_pair_that_fits_gets_a_table_of_acceptance_rates() -> None:
    done = command("estimate", *SHIPPED)
    text = " ".join(done.out.split())
    assert (done.code, done.err) == (0, "")
    assert "Fits: " in text and "acceptance rate best draft length speedup" in text
    assert "The table of pairs: 1.13 times plain decoding" in text and "bench measures it" in text


def test_the_object_for_programs_has_the_same_figures() -> None:
    done = command("estimate", *SHIPPED, "--no-expand-weights", "--json")
    found = json.loads(done.out)
    packed, speeds = found["target"], found["speeds"]
    assert packed["dtype"] == "8-bit, float32" and found["fits"]
    # A weight takes 8 bits, and 64 of them a scale and a bias in float32.
    assert packed["weights_bytes"] == pytest.approx(7e6 * (1 + 8 / 64), rel=0.02)
    assert speeds["step_seconds"] > 0 and 0 < speeds["draft_cost"] < 1
    assert [gain["acceptance_rate"] for gain in speeds["gains"]] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert all(gain["speed_up"] >= 1 for gain in speeds["gains"])


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ((), "name the draft model as well"),
        (("--draft-model", "mtp"), "give their directory"),
        (("--draft-model", "/nowhere"), "there is no directory /nowhere"),
        (("--draft-model", ROOT / "weights/t5-enfr-draft"), "give a draft of the target's own"),
        (("--draft-model", ROOT / "weights/py-llama-draft", "--q-bits", 4), "quantized already"),
        (("--draft-model", "x", "--prompt-tokens", 0), "--prompt-tokens"),
    ],
)
def test_a_pair_that_cannot_be_estimated_is_refused(draft: tuple[object, ...], says: str) -> None:
    command("estimate", "--model", ROOT / "weights/py-llama", *draft).refuses(says)


def test_a_drafter_is_no_target() -> None:
    drafter = ROOT / "weights/py-llama-dspark"
    command("estimate", "--model", drafter, "--draft-model", drafter).refuses("is a drafter")
