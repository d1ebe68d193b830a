"""The inspect command, and drafters on hidden states on the command line."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from ..support import mtp, speculators
from ..support.commands import Run, fails, strict, write
from ..support.speculators import dflash, eagle3, speculators_eagle3
from ..support.tokenizers import byte_level

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


TEXT = "some words"


@pytest.fixture(scope="module")
def vocabulary(llama: Path) -> int:
    return int(json.loads((llama / "config.json").read_text())["vocab_size"])


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("eagle3", eagle3),
        ("eagle3", speculators_eagle3),
        ("dflash", dflash),
        ("dflash2", lambda directory, **settings: dflash(directory, second=True, **settings)),
        ("dspark", lambda directory, **settings: dflash(directory, markov="vanilla", **settings)),
        ("mtp", speculators.mtp),
    ],
)
def test_a_drafter_is_named_as_a_draft_and_writes_the_same_text(
    kind: str, make, run: Run, llama: Path, vocabulary: int, tmp_path: Path
) -> None:
    drafter = make(tmp_path / "drafter", vocabulary=vocabulary)
    arguments = (TEXT, "--model", llama, "--max-tokens", 12, "--json", "--temp", 1, "--no-cache")
    plain = strict(run("generate", *arguments, "--regular-decode").out)
    for flags in (("--num-draft", 3), ("--proposer", kind)):
        done = run("generate", *arguments, "--draft-model", drafter, *flags)
        assert done.code == 0, done.err
        result = strict(done.out)
        assert result["text"] == plain["text"]
        assert result["proposer"] == kind
        assert result["draft_model"] == str(drafter)


def test_a_target_drafts_with_the_layers_of_its_own_checkpoint(run: Run, tmp_path: Path) -> None:
    arguments = (TEXT, "--max-tokens", 6, "--json", "--no-cache", "--num-draft", 3)
    for layer in (True, False):
        target = tmp_path / f"{layer}"
        byte_level(mtp.write("glm4_moe", target, vocabulary=400, layer=layer))
        done = run("generate", *arguments, "--model", target, "--proposer", "mtp")
        if not layer:
            fails(
                done, "the checkpoint carries no layers for multi-token prediction, which mlx-lm's"
            )
            continue
        result = strict(done.out)
        assert (result["proposer"], result["draft_model"]) == ("mtp", None)
        plain = run("generate", *arguments[:-2], "--model", target, "--regular-decode")
        assert result["text"] == strict(plain.out)["text"]


@pytest.mark.filterwarnings("default")
def test_a_drafter_that_is_hardly_ever_right_is_named_in_one_line(
    run: Run, llama: Path, vocabulary: int, tmp_path: Path, output: Path
) -> None:
    drafter = eagle3(tmp_path / "drafter", vocabulary=vocabulary)
    pair = ("--model", llama, "--draft-model", drafter, "--num-draft", 4)
    texts = write(tmp_path / "in.txt", [f"{TEXT} {n}" for n in range(6)])
    for request in (("generate", TEXT, "-m", 40, "--quiet"), ("batch", texts, "--output", output)):
        done = run(*request, *pair)
        assert done.code == 0
        [line] = [each for each in done.err.splitlines() if "hardly any" in each]
        assert line.startswith("warning: hardly any draft tokens are accepted (")
        assert f"{drafter} was probably made for another target" in line
        assert line.endswith("which benchmarks/probe.py in the repository tells")
        assert request[0] == "batch" or done.err == line + "\n"


def test_what_cannot_fit_is_refused_before_the_targets_weights_are_read(
    run: Run, llama: Path, vocabulary: int, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(llama, tmp_path / "target"))
    (target / "model.safetensors").write_bytes(b"no weights at all")
    for number, (make, request, part) in enumerate(
        (
            (eagle3, {"width": 48}, "hidden states of width 48, and this one has 32"),
            (dflash, {"width": 48}, "hidden states of width 48, and this one has 32"),
            (eagle3, {"vocabulary": 50, "drafted": 20}, "a vocabulary of 50, and this one has"),
            (eagle3, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads what layer 8"),
            (dflash, {"nested": {"target_layer_ids": [0, 7]}}, "reads what layer 7"),
            (eagle3, {"tensors": {"d2t": mx.full((32,), 10**6, mx.int64)}}, "a d2t that leads to"),
            (dflash, {"extra": {"more.weight": (2, 2)}}, "more.weight is not part"),
        )
    ):
        drafter = make(tmp_path / f"drafter-{number}", **{"vocabulary": vocabulary, **request})
        fails(run("generate", TEXT, "--model", target, "--draft-model", drafter), part)


def test_inspect_knows_drafters(run: Run, tmp_path: Path) -> None:
    for kind, make in (("eagle3", speculators_eagle3), ("dflash", dflash)):
        shown = strict(run("inspect", make(tmp_path / kind), "--json").out)
        assert shown["model_type"] == kind and shown["sizes"]["hidden_size"] == 32
        drafter = shown["drafter"]
        assert (drafter["kind"], drafter["target_hidden_size"]) == (kind, 32)
        assert drafter["target_layers"] == ([0, 1, 1] if kind == "eagle3" else [0, 1])
        assert shown["bytes"] > 0 and shown["problem"] is None
    words = " ".join(run("inspect", eagle3(tmp_path / "encoder", encoder=32)).out.split())
    assert "a target of width 32, 32 of 64 tokens; reads the outputs of its layers 0, 1, 1" in words
    assert "and its encoder's, of width 32" in words
    words = " ".join(run("inspect", speculators.eagle(tmp_path / "eagle")).out.split())
    assert "tokens; reads the input of its head" in words
    other = {"hydra_num_heads": 4, "model_type": "hydra"}
    speculators.write(tmp_path / "other", other, {"some.weight": mx.zeros((2, 2))})
    assert "some.weight" in run("inspect", tmp_path / "other").out


def test_a_drafter_is_no_target_and_no_draft_to_train(
    run: Run, llama: Path, vocabulary: int, tmp_path: Path
) -> None:
    drafter = eagle3(tmp_path / "drafter", vocabulary=vocabulary)
    fails(run("generate", TEXT, "--model", drafter), "a drafter of the kind eagle3 and no whole")
    pair = ("--model", llama, "--draft-model", drafter)
    data = tmp_path / "data.txt"
    data.write_text("a few words\n" * 30)
    output = ("--output", tmp_path / "out")
    fails(run("train-draft", *pair, "--data", data, *output), "is no draft model")
    assert not (tmp_path / "out").exists()
