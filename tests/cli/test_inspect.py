"""The inspect command: tables for people, one object for programs, one line for mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from ..support.commands import Run, fails

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_tables_say_format_family_bits_and_new_names(run: Run) -> None:
    done = run("inspect", FIXTURES / "gguf" / "llama-q4_0.gguf")
    assert done.code == 0 and done.err == ""
    for part in ("GGUF", "Q4_0", "bits each", "norm.weight", "-> model.norm.weight"):
        assert part in done.out
    assert done.out.count("blk.*.attn_q.weight") == 1


def test_json_lists_every_tensor_once(run: Run, t5: Path) -> None:
    done = run("inspect", t5, "--json")
    found = json.loads(done.out)
    names = [tensor["name"] for tensor in found["tensors"]]
    assert len(names) == len(set(names)) and "shared.weight" in names
    assert found["model_type"] == "t5" and found["bits_per_weight"] == 32
    assert found["problem"] is None and found["dropped"] == {}


def test_what_is_no_checkpoint_is_one_line(run: Run, tmp_path: Path) -> None:
    fails(run("inspect", tmp_path / "nothing"))


def test_heads_are_known(run: Run, tmp_path: Path) -> None:
    config = {"medusa_num_heads": 1, "base_model_name_or_path": "some/base", "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {"0.0.linear.weight": mx.zeros((8, 8)), "0.0.linear.bias": mx.zeros((8,))}
    mx.save_safetensors(str(tmp_path / "medusa_lm_head.safetensors"), arrays)
    done = run("inspect", tmp_path)
    assert done.code == 0 and "Medusa heads" in done.out and "some/base" in done.out
    assert "0.0.linear.weight" in done.out and "unknown" not in done.out.split("sizes")[0]
