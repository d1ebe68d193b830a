"""What Options and prompts mean is taken, what they cannot mean is refused by name."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specdec import OptionError, Options, load, stream_generate

PROMPT = [5, 9, 12, 7, 33, 21, 8]


@pytest.fixture(scope="module")
def pair(llama: Path) -> Any:
    return load(llama)


@pytest.fixture(scope="module")
def size(llama: Path) -> int:
    """The number of tokens of the model's vocabulary."""
    count: int = json.loads((llama / "config.json").read_text())["vocab_size"]
    return count


def test_numbers_of_numpy_are_pythons() -> None:
    numbers: dict[str, Any] = {"seed": np.int64(3), "max_tokens": np.int32(5)}
    numbers |= {"top_p": np.float32(0.5), "num_draft": True}
    options = Options(**numbers)
    assert options == Options(seed=3, max_tokens=5, top_p=0.5, num_draft=1)
    json.dumps(asdict(options))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.5),
        ("max_tokens", "3"),
        ("seed", None),
        ("seed", 3.0),
        ("num_draft", "three"),
        ("ngram_min", 1.5),
        ("top_k", None),
        ("temperature", "0.5"),
        ("temperature", 10**400),
        ("xtc_probability", "0.5"),
        ("xtc_special_tokens", ("a",)),
        ("prefill_step_size", 2.5),
        ("system_prompt", 3),
        ("chat_template_config", "thinking"),
        ("delta", None),
        ("stop", (3,)),
        ("stop", ("a", "")),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: "a"}),
        ("logit_bias", [3]),
        ("logit_bias", None),
        ("stop", 3),
        ("stop", b"self"),
        ("stop", None),
        ("xtc_special_tokens", 3),
        ("regular", "no"),
        ("chat_template", None),
    ],
)
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name.replace("_", "-")):
        Options(**{name: value})


def test_biases_are_copied_and_name_tokens_that_there_are(pair: Any, size: int) -> None:
    biases = {3: -1.0}
    options = Options(logit_bias=biases)
    biases[4] = 1.0
    assert options.logit_bias == {3: -1.0}
    with pytest.raises(OptionError, match=f"no token {size}"):
        stream_generate(pair, PROMPT, Options(logit_bias={size: 1.0}))


@pytest.mark.parametrize("token", ["<|end of it|>", 10**6, -1, "2.5"])
def test_extra_tokens_that_the_model_lacks_are_refused(pair: Any, token: Any) -> None:
    with pytest.raises(OptionError, match="extra-eos-token: the model has no token"):
        stream_generate(pair, PROMPT, Options(extra_eos_token=token))
