"""A converted published model keeps its perplexity within bounds, and runs in mlx-lm."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlx_specdec import Options, generate, load

from ..contract.support import command

CHANGE = re.compile(r"perplexity (\S+) -> (\S+?)[ ,;(].*same first choice at (\S+)%", re.DOTALL)
PROMPT = "Write a short poem about the sea."


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name, bits, growth, same_first",
    # The largest growth of perplexity and the smallest share of positions whose likeliest token
    # stays. The 4-bit blocks of SmolLM2's file are kept. Measured on x86, in percent:
    [
        pytest.param("smollm2", 4, 1e-4, 0.999, id="smollm2, 4 bits"),  # 0 and 100
        pytest.param("smollm2", 8, 0.03, 0.94, id="smollm2, 8 bits"),  # -1.6 and 97
        pytest.param("gemma3", 4, 0.6, 0.55, id="gemma3, 4 bits"),  # 46 and 65
        pytest.param("gemma3", 8, 0.02, 0.95, id="gemma3, 8 bits"),  # 0.7 and 98
        pytest.param("qwen-coder", 4, 0.1, 0.7, id="qwen-coder, 4 bits"),  # 6 and 79
        pytest.param("qwen-coder", 8, 0.01, 0.97, id="qwen-coder, 8 bits"),  # 0.1 and 99
    ],
    indirect=["name"],
)
def test_a_converted_model_keeps_its_perplexity_and_runs_in_mlx_lm(
    model: Path, tmp_path: Path, bits: int, growth: float, same_first: float
):
    made = tmp_path / "converted"
    done = command("convert", "--model", model, "--mlx-path", made, "-q", "--q-bits", bits)
    assert done.code == 0 and ("loses a lot" in done.err) == (same_first < 0.9), done
    change = CHANGE.search(done.err)
    assert change is not None, done.err
    before, after, share = map(float, change.groups())
    assert abs(after / before - 1) < growth and share / 100 >= same_first

    pair = load(made, dtype="float32", expand_weights=True)
    chats = pair.tokenizer.has_chat_template
    prompt = pair.tokenizer.apply_chat(PROMPT) if chats else pair.tokenizer.encode(PROMPT)
    tokens = generate(pair, prompt, Options(max_tokens=24, regular=True, cost_cache=False)).tokens
    network, _ = load_model(made)
    network.set_dtype(mx.float32)
    logits = network(mx.array([[*prompt, *tokens[:-1]]]))[0, -len(tokens) :]
    assert tuple(mx.argmax(logits, axis=-1).tolist()) == tokens
