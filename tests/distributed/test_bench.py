"""`bench` measures a target that ranks share."""

import json
from pathlib import Path

import pytest

from ..support import loopback

pytestmark = pytest.mark.slow


def test_rank_0_alone_prints_what_it_measured(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "eos_token_id": 999}
    target, draft = (
        loopback.write("llama", tmp_path / name, noise=noise, **changes)
        for name, noise in (("target", 0.0), ("draft", 0.01))
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{loopback.PROMPT}\n")
    models = ["--distributed", "tensor", "--model", str(target), "--draft-model", str(draft)]
    effort = ["--num-draft", "2,auto", "-m", "8", "--repeats", "1", "--no-cost-cache"]
    command = ["-m", "mlx_specdec", "bench", str(prompts), *models, *effort]
    ended = loopback.run(tmp_path, 2, *command, "--json")
    assert [process.code for process in ended] == [0, 0], ended
    result = json.loads(ended[0].out)
    assert all(not one["differences"] for one in result["methods"])
    assert ended[1].out == ended[1].err == ""
