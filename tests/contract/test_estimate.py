"""`estimate` computes what a pair takes from config.json and the headers of the weights. The tests
compute the same by hand from the shapes of tiny models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .support import ROOT, checkpoint, command

SHIPPED = ("--model", ROOT / "weights/py-llama", "--draft-model", ROOT / "weights/py-llama-draft")
WEIGHTS = 10**12
LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD = 2, 32, 48, 4, 2, 8
"""Sizes of the models in tests/support/tiny.py."""
ATTENTION = 2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KV_HEADS * HEAD
LAYER = ATTENTION + 3 * WIDTH * INNER + 2 * WIDTH
"""The weights of a layer: attention, a network of three matrices, and two norms."""
TOKENS = 10 + 128
"""Tokens in the caches for the prompt of these tests."""


def estimated(target: Path, *flags: object, draft: Path | None = None) -> Any:
    """Return the object that `estimate --json` prints for two models, by default equal ones."""
    words = ("--model", target, "--draft-model", draft or target, "--prompt-tokens", TOKENS - 128)
    done = command("estimate", *words, *flags, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def vocabulary(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


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


@pytest.mark.parametrize("tied", [False, True])
def test_the_sizes_of_a_dense_model(tmp_path: Path, tied: bool) -> None:
    path = checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    found = estimated(path, "--dtype", "float32")["target"]
    table = 4 * vocabulary(path) * WIDTH
    layers = 4 * (LAYERS * LAYER + WIDTH)  # and the last norm
    caches = 4 * LAYERS * 2 * KV_HEADS * HEAD * TOKENS
    assert found["weights_bytes"] == layers + table * (1 if tied else 2)
    assert found["caches_bytes"] == caches
    # A step reads the head, which may be the embedding, and otherwise only a row of the embedding.
    assert found["step_bytes"] == layers + table + caches
    assert found["head_bytes"] == table


def test_a_step_reads_only_the_experts_of_its_token(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", "qwen3_moe")
    found = estimated(path, "--dtype", "float32")["target"]
    experts = 4 * LAYERS * 4 * 3 * WIDTH * 32  # 4 experts of three matrices
    assert (found["experts_bytes"], found["routed"]) == (experts, 2 / 4)
    table = 4 * vocabulary(path) * WIDTH
    read = found["weights_bytes"] - table - experts / 2 + found["caches_bytes"]
    assert found["step_bytes"] == read


def test_caches_of_layers_with_a_window_stop_growing(tmp_path: Path) -> None:
    found = estimated(checkpoint(tmp_path / "model", "llama_sliding"), "--dtype", "float32")
    # Two of the three layers keep 8 tokens.
    assert found["target"]["caches_bytes"] == 4 * 2 * KV_HEADS * HEAD * (2 * 8 + TOKENS)


def test_caches_of_latent_attention_hold_one_vector_for_all_heads(tmp_path: Path) -> None:
    found = estimated(checkpoint(tmp_path / "model", "deepseek_v3"), "--dtype", "float32")
    assert found["target"]["caches_bytes"] == 4 * LAYERS * (16 + 4) * TOKENS


def test_quantized_weights_are_stored_with_a_scale_and_a_bias_of_each_group() -> None:
    kept, expanded = (estimated(SHIPPED[1], f"--{no}expand-weights") for no in ("no-", ""))
    packed, plain = kept["target"], expanded["target"]
    assert (packed["bits"], packed["dtype"], plain["bits"]) == (8, "float32", None)
    # Matrices, which have nearly all weights, shrink from 32 bits to 8 bits and 2 / 64 numbers.
    ratio = packed["weights_bytes"] / plain["weights_bytes"]
    assert ratio == pytest.approx((8 + 2 * 32 / 64) / 32, rel=0.01)
    assert packed["head_bytes"] / plain["head_bytes"] == pytest.approx((8 + 1) / 32)


@pytest.mark.parametrize(
    # A weight of 4 bits has a scale and a bias in 16 bits with 63 others.
    ("bits", "size"),
    [(None, 2 * WEIGHTS), (4, WEIGHTS * (4 + 2 * 16 / 64) / 8)],
)
def test_a_pair_that_does_not_fit_gets_its_sizes_and_no_speed(
    tmp_path: Path, bits: int | None, size: float
) -> None:
    target, draft = huge(tmp_path / "huge"), checkpoint(tmp_path / "draft")
    flags = ("--dtype", "bfloat16", *(("--q-bits", bits) if bits else ()))
    found = estimated(target, *flags, draft=draft)
    assert (found["target"]["bits"], found["target"]["weights_bytes"]) == (bits, size)
    # Keys and values of 8 heads of width 128 in 100 layers.
    assert found["target"]["caches_bytes"] == 2 * 100 * 2 * 8 * 128 * TOKENS
    models = found["target"], found["draft"]
    need = sum(model["weights_bytes"] + model["caches_bytes"] for model in models)
    assert found["memory_bytes"] == need > found["memory_limit_bytes"]
    assert (found["fits"], found["gains"]) == (False, [])
    shown = command("estimate", "--model", target, "--draft-model", draft, *flags)
    assert "do NOT fit" in shown.out and "speedup" not in shown.out


def test_a_pair_that_fits_gets_a_table_of_acceptance_rates() -> None:
    done = command("estimate", *SHIPPED)
    text = " ".join(done.out.split())
    assert (done.code, done.err) == (0, "")
    assert "They fit." in text and "acceptance rate draft length speedup tokens/s" in text
    assert re.search(r"The table of pairs: \d\.\d\d times plain decoding", text)
    assert "bench measures it" in text


def test_gains_follow_from_sizes_and_acceptance_rates() -> None:
    found = estimated(SHIPPED[1], draft=SHIPPED[3])
    assert [gain["acceptance_rate"] for gain in found["gains"]] == [0.5, 0.6, 0.7, 0.8, 0.9]
    cost = found["draft"]["step_bytes"] / found["target"]["step_bytes"]
    plain = [gain["tokens_per_second"] / gain["speed_up"] for gain in found["gains"]]
    assert plain == [pytest.approx(plain[0])] * 5
    for gain in found["gains"]:
        # A pass over several tokens costs at least a plain step, but for errors of measurement.
        rate, n = gain["acceptance_rate"], gain["num_draft"]
        most = sum(rate**k for k in range(n + 1)) / (n * cost + 1)
        assert n in (0, 1, 2, 4, 8) and 1 - 1e-9 <= gain["speed_up"] <= 1.2 * most
