"""The estimate command, on configurations alone."""

from pathlib import Path

import pytest

from mlx_specdec.measure import estimate as estimating
from mlx_specdec.measure.estimate import ModelSource
from mlx_specdec.process import device_name

from ..support import tiny
from ..support.commands import Run, fails, strict
from ..support.estimates import T5, only_config

QUICK = ("--turns", 1, "--prompt-tokens", 8, "--max-tokens", 8)
CLUSTER = ("--distributed", "2", "--link-us", "150")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[object, ...]:
    """Flags of two directories without weights and tokenizers."""
    big = only_config(tmp_path / "big", T5)
    small = only_config(tmp_path / "small", {**T5, "num_decoder_layers": 1})
    return ("--model", big, "--draft-model", small, *QUICK)


def test_the_json_object_is_all_that_is_printed(run: Run, pair: tuple[object, ...]) -> None:
    done = run("estimate", *pair, "--json")
    assert (done.code, done.err) == (0, "")
    found = strict(done.out)
    assert " ".join(found) == (
        "proposer target draft prompt_tokens max_tokens memory_limit_bytes speeds memory_bytes "
        "fits notes device blas"
    )
    assert found["fits"] and found["device"] == device_name()
    assert len(found["speeds"]["passes"]) == 17 and min(found["speeds"]["passes"]) >= 0
    assert found["speeds"]["draft_cost"] >= 0
    assert [one["alpha"] for one in found["speeds"]["predictions"]][-1] == 0.95
    assert found["target"]["layers"] == 5 and found["draft"]["layers"] == 1


def test_tables_and_sentences_for_people(run: Run, pair: tuple[object, ...]) -> None:
    done = run("estimate", *pair)
    assert done.code == 0 and "\x1b" not in done.out
    assert "Fits: " in done.out and "A plain step takes" in done.out
    assert "95%" in done.out and "speedup" in done.out and "Note: weights are random" in done.out
    assert "mlx-specdec bench measures it" in " ".join(done.out.split())


def test_a_pair_that_does_not_fit_gets_a_clear_no(run: Run, tmp_path: Path) -> None:
    huge = {**tiny.CONFIGS["llama"], "hidden_size": 16384, "intermediate_size": 53248}
    huge |= {"num_attention_heads": 128, "head_dim": 128, "num_hidden_layers": 126}
    model = only_config(tmp_path / "huge", huge)
    draft = only_config(tmp_path / "small", tiny.CONFIGS["llama"])
    arguments = ("estimate", "--model", model, "--draft-model", draft, "--dtype", "float32", *QUICK)
    done = run(*arguments)
    assert done.code == 0
    assert "NO: it would not fit" in done.out and "speedup" not in done.out
    found = strict(run(*arguments, "--json").out)
    assert found["fits"] is False and found["speeds"] is None
    assert found["target"]["weights_bytes"] > 1e12


def test_types_and_packing_are_requested_with_the_flags_of_generate(
    run: Run, pair: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[ModelSource] = []

    def look(target: ModelSource, draft: ModelSource, *rest: object, **more: object):
        requests.extend((target, draft))
        return whole(target, draft, *rest, **more)

    whole = estimating.estimate
    monkeypatch.setattr(estimating, "estimate", look)
    bits = ("--q-bits", 8, "--draft-q-bits", 4, "--dtype", "bfloat16")
    found = strict(run("estimate", *pair, *bits, "--json").out)
    assert [(one.dtype, one.q_bits) for one in requests] == [("bfloat16", 8), ("bfloat16", 4)]
    assert found["target"]["dtype"] == "8-bit, bfloat16"
    assert found["draft"]["dtype"] == "4-bit, bfloat16"


def test_the_target_at_fewer_bits_is_a_draft(run: Run, tmp_path: Path) -> None:
    whole = only_config(tmp_path / "whole", {**T5, "d_model": 64})
    packed = {**T5, "d_model": 64, "quantization": {"bits": 8, "group_size": 64}}
    quantized = only_config(tmp_path / "quantized", packed)
    for model, bits, wanted in ((whole, (), 4), (quantized, ("--draft-q-bits", 2), 2)):
        arguments = ("estimate", "--model", model, "--draft-model", "self", "--dtype", "bfloat16")
        output = strict(run(*arguments, *bits, *QUICK, "--json").out)
        assert (output["draft"]["name"], output["draft"]["dtype"]) == (
            "self",
            f"{wanted}-bit, bfloat16",
        )
        assert output["draft"]["layers"] == output["target"]["layers"]
        assert output["draft"]["weights_bytes"] < output["target"]["weights_bytes"]
        assert any("shares" in note for note in output["notes"])


@pytest.mark.cpu_only
@pytest.mark.parametrize("inside", [False, True], ids=["file", "directory"])
def test_a_gguf_file_is_estimated(run: Run, tmp_path: Path, inside: bool) -> None:
    model = Path(__file__).parents[1] / "fixtures" / "gguf" / "llama-q4_0.gguf"
    if inside:
        (tmp_path / model.name).symlink_to(model)
        model = tmp_path
    arguments = ("estimate", "--model", model, "--draft-model", model, *QUICK, "--json")
    for flags, dtype in (((), "float32"), (("--no-expand-weights",), "4-bit, float32")):
        found = strict(run(*arguments, *flags).out)
        assert found["target"]["dtype"] == found["draft"]["dtype"] == dtype
        assert found["speeds"]["passes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "{big}"), "--draft-model"),
        (("--model", "{big}", "--draft-model", "/nowhere"), "there is no directory /nowhere"),
        (("--model", "{big}", "--draft-model", "mtp"), "give their directory"),
        (("--model", "{big}", "--draft-model", "{empty}"), "has no config.json"),
        (("--model", "{big}", "--draft-model", "{big}", "--turns", "0"), "--turns"),
        (("--model", "{big}", "--draft-model", "{llama}"), "target's own kind"),
        (("--model", "{big}", "--draft-model", "{big}", "--q-bits", "5000"), "q-bits must be"),
        (("--model", "{big}", "--draft-model", "{big}", "--distributed", "2"), "--link-us"),
        (("--model", "{big}", "--draft-model", "{big}", "--distributed", "1"), "--distributed"),
        (("--model", "{big}", "--draft-model", "{big}", "--pipeline"), "--distributed"),
        (
            ("--model", "{big}", "--draft-model", "{big}", *CLUSTER, "--pipeline"),
            "cannot be a pipeline",
        ),
    ],
)
def test_what_is_wrong_is_reported_in_a_line(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {
        "big": only_config(tmp_path / "big", T5),
        "llama": only_config(tmp_path / "llama", tiny.CONFIGS["llama"]),
        "empty": tmp_path / "empty",
    }
    fails(run("estimate", *(text.format(**names) for text in arguments)), words)


def test_several_machines_are_one_more_table(run: Run, pair: tuple[object, ...]) -> None:
    arguments = ("estimate", *pair, *CLUSTER)
    done = run(*arguments)
    assert done.code == 0 and "on each of 2 machines" in done.out
    assert "On 2 machines (tensor) a plain step takes" in done.out
    assert "16 exchanges of 150 us" in done.out and "gains more above, us" in done.out
    found = strict(run(*arguments, "--json").out)["cluster"]
    assert (found["mode"], found["exchanges"], found["link_us"]) == ("tensor", 16, 150)
    assert len(found["speeds"]["predictions"]) == 6
