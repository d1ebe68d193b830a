"""provenance.json says what was read, what became of it, and which bytes both sides have."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import __version__
from mlx_specdec.checkpoints import t5_keys as keys
from mlx_specdec.conversion import report as digests
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.report import Digests, combined
from mlx_specdec.errors import CheckpointError

from ..support import tiny
from ..support.checkpoints import T5, t5_weights, write_sharded_t5, write_t5

FIXTURES = Path(__file__).parents[1] / "fixtures"
BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def provenance(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "provenance.json").read_text(encoding="utf-8"))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_digests_are_those_of_the_files_on_both_sides(tmp_path: Path) -> None:
    source = write_sharded_t5(tmp_path / "t5")
    report = convert(str(source), tmp_path / "out", shard_bytes=20_000)
    found = provenance(tmp_path / "out")
    for directory, side in ((source, "source"), (tmp_path / "out", "result")):
        files = found[side]["files"]
        weights = {file.name for file in directory.glob("*.safetensors")}
        assert weights | {"config.json"} <= files.keys()
        for name, entry in files.items():
            file = directory / name
            assert entry == {"bytes": file.stat().st_size, "sha256": sha256(file)}
        lines = "".join(f"{files[name]['sha256']}  {name}\n" for name in sorted(files))
        assert found[side]["digest"] == hashlib.sha256(lines.encode()).hexdigest()
    assert found["source"]["digest"][:16] in report.describe()
    assert found["result"]["digest"][:16] in report.describe()


def test_every_tensor_left_out_is_named_with_the_reason(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    weights["lm_head.weight"] = weights["shared.weight"] + 0
    weights[BIAS] = mx.zeros((8, 4))
    source = write_t5(tmp_path / "t5", weights=weights)
    report = convert(str(source), tmp_path / "out", dtype="bfloat16")
    tensors = provenance(tmp_path / "out")["tensors"]
    assert tensors["read"] == len(weights)
    assert tensors["tied"] == {"lm_head.weight": "shared.weight"}
    assert tensors["dropped"] == {BIAS: keys.UNUSED}
    for part in (BIAS, keys.UNUSED, "lm_head.weight"):
        assert part in report.describe()


def test_names_types_and_bits_are_told_and_no_directory_of_this_machine(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5")
    report = convert(str(source), tmp_path / "out", quantize=True, q_group_size=32)
    found = provenance(tmp_path / "out")
    assert found["tool"] == f"mlx-specdec {__version__}"
    assert (found["source"]["name"], found["source"]["format"]) == ("t5", "safetensors")
    assert found["result"]["bits_per_weight"] == pytest.approx(report.bits_per_weight, abs=1e-4)
    assert "4-bit" in found["result"]["dtype"]
    assert str(tmp_path) not in (tmp_path / "out" / "provenance.json").read_text()


def test_renamed_tensors_are_told_under_the_sources_names(tmp_path: Path) -> None:
    source = FIXTURES / "gguf" / "t5-copied-head.gguf"
    convert(str(source), tmp_path / "out")
    found = provenance(tmp_path / "out")
    assert found["tensors"]["renamed"]["token_embd.weight"] == "shared.weight"
    assert found["tensors"]["tied"] == {"output.weight": "token_embd.weight"}
    assert found["source"]["files"] == {
        source.name: {"bytes": source.stat().st_size, "sha256": sha256(source)}
    }


def test_parts_of_metas_layout_go_by_their_own_names(tmp_path: Path) -> None:
    source = FIXTURES / "meta" / "llama2"
    convert(str(source), tmp_path / "out")
    files = provenance(tmp_path / "out")["source"]["files"]
    assert files.keys() == {file.name for file in source.glob("*.pth")} | {"params.json"}


def test_experts_that_mlx_lm_joins_are_told_as_joined(tmp_path: Path) -> None:
    source = FIXTURES / "gguf" / "mixtral-old.gguf"
    report = convert(str(source), tmp_path / "out")
    tensors = provenance(tmp_path / "out")["tensors"]
    assert len(tensors["joined"]) > len(tensors["computed"]) > 0
    assert "joined into" in report.describe()


def test_the_same_conversion_writes_the_same_file(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5")
    texts = []
    for name in ("one", "two"):
        convert(str(source), tmp_path / name)
        texts.append((tmp_path / name / "provenance.json").read_bytes())
    assert texts[0] == texts[1]


def test_mlx_lm_still_loads_what_has_a_provenance(tmp_path: Path) -> None:
    import mlx_lm

    source = tiny.write("llama", tmp_path / "llama")
    convert(str(source), tmp_path / "out")
    assert (tmp_path / "out" / "provenance.json").is_file()
    model, _ = mlx_lm.utils.load_model(tmp_path / "out")
    assert model(mx.array([[1, 2, 3]])).shape[1] == 3


def test_files_longer_than_the_buffer_have_their_own_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "BUFFER_BYTES", 1000)
    (tmp_path / "a").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "b").write_bytes(b"")
    with Digests([tmp_path / "a", tmp_path / "b"]) as work:
        found = work.result()
    assert {name: one.sha256 for name, one in found.items()} == {
        name: sha256(tmp_path / name) for name in ("a", "b")
    }
    assert combined(found) != combined({"a": found["a"]})


def test_a_file_that_goes_away_is_one_sentence(tmp_path: Path) -> None:
    with Digests([tmp_path / "gone"]) as work, pytest.raises(CheckpointError, match="gone"):
        work.result()


def test_leaving_the_block_ends_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BUFFER_BYTES", 1)
    (tmp_path / "large").write_bytes(bytes(3_000_000))
    with Digests([tmp_path / "large"]) as work:
        pass
    assert "large" not in work.result()
