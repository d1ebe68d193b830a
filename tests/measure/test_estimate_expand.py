"""Which layers estimate times for a quantized model: quantized ones or dequantized ones."""

from pathlib import Path

import pytest

from mlx_specdec.checkpoints.files import described
from mlx_specdec.checkpoints.source import as_directory
from mlx_specdec.measure import estimate as estimating
from mlx_specdec.measure.estimate import ModelSource, estimate, own_draft
from mlx_specdec.measure.passes import parts
from mlx_specdec.models import number_format
from mlx_specdec.models.loading import load_model, outline
from mlx_specdec.models.number_format import count, is_quantized

from ..support.estimates import LLAMA, QUICK, T5, ticking
from ..support.gguf_files import llama

FIXTURES = Path(__file__).parents[1] / "fixtures"
GGUF = sorted((FIXTURES / "gguf").glob("*.gguf"))
ENTRY = {"quantization": {"bits": 4, "group_size": 32}}

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each model that estimate times is quantized; large models are timed in parts."""
    found: list[bool] = []
    prefilled = estimating._prefilled

    def look(model, *rest):
        found.append(is_quantized(model.network))
        return prefilled(model, *rest)

    monkeypatch.setattr(estimating, "_prefilled", look)
    monkeypatch.setattr(estimating, "usable_memory", lambda: 1 << 30)
    monkeypatch.setattr("mlx_specdec.measure.passes.measure", lambda *_, **__: None)
    few = "mlx_specdec.measure.passes.parts"
    monkeypatch.setattr(few, lambda sizes: parts(sizes, most=30_000, least=1))
    return found


@pytest.mark.parametrize(
    "config", [LLAMA, {**T5, "num_decoder_layers": 10, "d_ff": 128}], ids=["llama", "t5"]
)
def test_the_size_of_the_whole_model_decides_for_the_layers_that_are_timed(
    config: dict, timed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**config, **ENTRY}
    size = 4 * count(outline(config, "whole").network)
    assert 4 * count(outline(config, "part", depth=3).network) < size / 2
    for limit, quantized in ((size, True), (size + 4, False)):
        monkeypatch.setattr(number_format.sizes, "memory", lambda limit=limit: 4 * limit)
        for expand, expected in ((None, quantized), (True, False), (False, True)):
            timed.clear()
            source = ModelSource("big", config, expand=expand)
            found = estimate(source, source, **QUICK, clock=ticking())
            assert found.target.measured_layers is not None
            assert timed == [expected] * 4
            assert found.target.dtype == ("4-bit, float32" if expected else "float32")


def test_layers_of_the_target_draft_with_the_weights_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**LLAMA, **ENTRY}
    size = 4 * count(outline(config, "whole").network)
    for limit, words in ((size, "4-bit, float32"), (size + 4, "float32")):
        monkeypatch.setattr(number_format.sizes, "memory", lambda limit=limit: 4 * limit)
        draft = own_draft(ModelSource("big", config), "self:2").outline()
        assert (draft.dtype, len(draft.layers)) == (words, 2)
    on_load = ModelSource("big", {**LLAMA, "hidden_size": 64}, q_bits=8)
    assert own_draft(on_load, "self:2").outline().dtype == "8-bit, float32"
    assert own_draft(on_load, "self").outline().dtype == "4-bit, float32"
    assert own_draft(on_load, "self:2", 2).outline().dtype == "2-bit, float32"


def test_layers_that_are_quantized_in_their_own_way_are_found_by_name() -> None:
    # "mode" names no layer, although names of layers begin with these letters.
    entry = {"bits": 4, "group_size": 32, "mode": "affine"}
    plain = outline({**LLAMA, "quantization": entry}, "plain", expand=False)
    settings = {"model.layers.1.mlp.gate_proj": {"bits": 8, "group_size": 32}}
    wider = outline({**LLAMA, "quantization": {**entry, **settings}}, "wider", expand=False)
    size = LLAMA["hidden_size"] * LLAMA["intermediate_size"]
    assert wider.nbytes - plain.nbytes == size * 4 // 8
    less = {**entry, "model.layers.1.mlp.gate_proj": False}
    assert outline({**LLAMA, "quantization": less}, "less", expand=False).nbytes > wider.nbytes


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("file", GGUF, ids=lambda file: file.stem)
def test_a_gguf_file_is_outlined_as_it_loads(file: Path, expand: bool) -> None:
    with as_directory(file) as directory:
        loaded = load_model(directory, expand=expand)
    outlined = outline(described(file), file.name, expand=expand)
    assert outlined.nbytes == loaded.model.nbytes
    assert outlined.vocabulary == loaded.model.vocabulary
    assert outlined.dtype.rpartition(" ")[2] == loaded.dtype.rpartition(" ")[2]


def test_a_gguf_file_says_the_dtype_of_what_it_does_not_quantize(tmp_path: Path) -> None:
    assert described(llama().write(tmp_path / "half.gguf"))["torch_dtype"] == "float16"
    wide = llama()
    wide.arrays = {name: array.astype("float32") for name, array in wide.arrays.items()}
    assert described(wide.write(tmp_path / "wide.gguf"))["torch_dtype"] == "float32"


def test_the_layout_of_meta_is_described_as_well() -> None:
    for directory in sorted(path for path in (FIXTURES / "meta").iterdir() if path.is_dir()):
        assert described(directory)["model_type"] == "llama"
