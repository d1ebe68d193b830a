import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.errors import CheckpointError, OptionError
from mlx_specdec.models.loading import load_model, outline

from ..support import tiny
from ..support.estimates import T5
from ..support.models import make_t5
from ..support.pairs import read

SHIPPED = Path(__file__).parents[2] / "weights"


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_an_outline_has_the_bytes_of_the_model_that_loads(family: str, tmp_path: Path) -> None:
    loaded = load_model(tiny.write(family, tmp_path / family))
    described = outline(tiny.CONFIGS[family], family)
    assert described.nbytes == loaded.model.nbytes
    assert described.vocabulary == loaded.model.vocabulary
    assert described.dtype == loaded.dtype == "float32"
    assert len(described.layers) == len(described.layer_nbytes) > 1
    assert sum(described.layer_nbytes) < described.nbytes


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_on_load_gives_the_same_bytes(bits: int, tmp_path: Path) -> None:
    directory = make_t5(tmp_path)
    config = {**config_of(directory), "tie_word_embeddings": False}
    loaded = load_model(directory, q_bits=bits, q_group_size=32)
    described = outline(config, "t5", q_bits=bits, q_group_size=32)
    assert (described.nbytes, described.dtype) == (loaded.model.nbytes, loaded.dtype)
    llama = load_model(tiny.write("llama", tmp_path / "llama"), q_bits=bits, q_group_size=32)
    described = outline(tiny.CONFIGS["llama"], "llama", q_bits=bits, q_group_size=32)
    assert (described.nbytes, described.dtype) == (llama.model.nbytes, llama.dtype)


@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_an_outline_has_the_bytes_of_the_caches_that_decoding_fills(family: str) -> None:
    described = outline(tiny.CONFIGS[family], family)
    settings = described.cache_nbytes(19, 5)
    model = described.model()
    context = read(model, list(range(2, 22)))
    context.advance(mx.array([[3]]))
    scores = context.advance(mx.array([[3, 4, 5, 6]]))
    mx.eval(scores.logits)
    assert settings == context.nbytes > 0


def test_a_t5_has_the_bytes_of_its_caches_and_memory() -> None:
    described = outline(T5, "t5", dtype="float32")
    settings = described.cache_nbytes(20, 300)
    context = described.model().open([5] * 20)
    mx.eval(context.advance(mx.array([[3] * 300])).logits)
    arrays = list(context._source.arrays(0))
    arrays += [a for c in context._caches for a in c.state]
    assert settings == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_random_weights_give_finite_logits(bits: int) -> None:
    for config in (T5, tiny.CONFIGS["llama"]):
        described = outline(config, "tiny", q_bits=bits, q_group_size=32)
        assert described.dtype == f"{bits}-bit, float32"
        logits = described.model().open([3, 4]).advance(mx.array([[4, 5]])).logits
        assert mx.all(mx.isfinite(logits)).item()
        assert 0.05 < mx.sqrt(mx.var(logits)).item() < 20


def test_a_model_can_be_cut_to_its_first_layers() -> None:
    complete = outline(T5, "t5")
    cut = outline(T5, "t5", depth=2)
    assert list(cut.layers) == list(complete.layers[:2])
    assert cut.nbytes < complete.nbytes
    for family in ("llama", "gemma3", "gemma3_wrapped", "qwen3_next", "deepseek_v3"):
        config = tiny.CONFIGS[family]
        complete, cut = outline(config, family), outline(config, family, depth=2)
        assert list(cut.layers) == list(complete.layers[:2])
        assert cut.nbytes + sum(complete.layer_nbytes[2:]) == complete.nbytes


def test_what_config_json_says_of_packing_and_types_is_taken() -> None:
    config = {**tiny.CONFIGS["llama"], "torch_dtype": "bfloat16"}
    entry = {"bits": 4, "group_size": 32, "lm_head": False}
    described = outline({**config, "quantization": entry}, "packed", dtype="bfloat16")
    plain = outline(config, "plain", dtype="bfloat16")
    assert described.dtype == "4-bit, bfloat16" and described.nbytes < plain.nbytes
    head = {**entry, "lm_head": {"bits": 8, "group_size": 32}}
    wider = outline({**config, "quantization": head}, "packed", dtype="bfloat16")
    assert described.nbytes > wider.nbytes
    entry_of_gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    gptq = outline({**config, "quantization_config": entry_of_gptq}, "gptq", dtype="bfloat16")
    assert gptq.dtype == "4-bit, bfloat16"


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"model_type": "llama"}, {}, "does not describe a model that mlx-lm can build"),
        ({**tiny.CONFIGS["llama"], "model_file": "x.py"}, {}, "none is run"),
        ({"model_type": "t5", "vocab_size": 5}, {}, "d_model"),
        ({**T5, "quantization": {"bits": 4, "group_size": 32}}, {"q_bits": 4}, "already"),
    ],
)
def test_what_cannot_be_outlined_is_reported_in_a_sentence(
    config: dict, options: dict, words: str
) -> None:
    with pytest.raises((CheckpointError, OptionError), match=words) as caught:
        outline(config, "some/model", **options)
    assert "\n" not in str(caught.value)
