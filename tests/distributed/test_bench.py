"""`bench` on a target that ranks share reports the time of sums over the network."""

import json
from pathlib import Path

import pytest

from ..support import loopback

pytestmark = pytest.mark.slow
LAYERS = 2


def test_bench_tells_what_sums_take_and_what_one_machine_would_gain(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": LAYERS, "eos_token_id": 999}
    target, draft = (
        loopback.write("llama", tmp_path / name, noise=noise, **changes)
        for name, noise in (("target", 0.0), ("draft", 0.01))
    )
    prompts, report = tmp_path / "prompts.txt", tmp_path / "report.html"
    prompts.write_text(f"{loopback.PROMPT}\n")
    models = ["--distributed", "tensor", "--model", str(target), "--draft-model", str(draft)]
    effort = ["--num-draft", "2,auto", "-m", "8", "--repeats", "1", "--no-cache"]
    command = ["-m", "mlx_specdec", "bench", str(prompts), *models, *effort]
    ended = loopback.run(tmp_path, 2, *command, "--json", "--report", str(report))
    assert [process.code for process in ended] == [0, 0], ended
    result = json.loads(ended[0].out)
    assert all(not one["differences"] for one in result["methods"])
    cluster = result["cluster"]
    assert (cluster["machines"], cluster["mode"]) == (2, "tensor")
    assert cluster["exchanges"] == 2 * LAYERS + 1 and 0.5 < cluster["share"] < 1
    assert set(cluster["exchange_us"]) == {"1", "3"}
    assert all(us > 0 for us in cluster["exchange_us"].values())
    # On a busy machine sums alone may take as long as steps.
    assert {gain["name"] for gain in cluster["gains"]} <= {"draft 2"}
    assert "an all_sum takes" in ended[0].err
    assert "On several machines" in report.read_text()
    assert ended[1].out == ended[1].err == ""
