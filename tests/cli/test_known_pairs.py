"""The table of pairs: shown, searched by name, and used by --draft-model auto."""

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from rich.console import Console

from mlx_specdec.checkpoints import disk
from mlx_specdec.checkpoints.source import resolve
from mlx_specdec.cli import loading, render
from mlx_specdec.cli.pairs import USES, best_for, draft_for, known_pairs, room
from mlx_specdec.errors import OptionError
from mlx_specdec.measure.estimate import ModelSource
from mlx_specdec.measure.prediction import ALPHAS, BestLength, Estimate, Side, Speeds
from mlx_specdec.models import number_format
from mlx_specdec.models.drafters import KINDS

from ..support.commands import Run, strict
from ..support.shipped import ROOT

GB = 10**9
QWEN3 = "mlx-community/Qwen3-{}-{}bit".format


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say what this machine is: bytes for models, whether it has no accelerator, and of a Mac the
    memory. What `estimate` would measure there is given."""

    def pretend(nbytes: int, cpu: bool = False, mac: int | None = None) -> None:
        monkeypatch.setattr(mx.metal, "is_available", lambda: mac is not None)
        monkeypatch.setattr(disk, "usable_memory", lambda: nbytes)
        monkeypatch.setattr(disk, "memory", lambda: mac or nbytes)
        monkeypatch.setattr(number_format, "on_cpu", lambda: cpu)

    def estimate(target: ModelSource, draft: ModelSource, **rest: object) -> Estimate:
        side = Side(f"{target.name} {target.q_bits} {draft.name}", "", 9, 1, 1, 1, None)
        gains = tuple(BestLength(alpha, 2, 1 + alpha) for alpha in ALPHAS)
        speeds = Speeds(0.05, 0.01, 0.2, (1.0,), 0.0, False, 3, 0.0, gains)
        return Estimate("draft", side, side, 128, 128, 9, speeds)

    monkeypatch.setattr("mlx_specdec.measure.estimate.estimate", estimate)
    return pretend


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, draft_model: str | None, **rest: object) -> None:
        bits = rest.get("q_bits"), rest.get("draft_q_bits")
        raise OptionError(f"loading {model} with {draft_model}" + (f" {bits}" if any(bits) else ""))

    monkeypatch.setattr("mlx_specdec.engine.loading.load", load)


def test_the_table_is_consistent() -> None:
    known = known_pairs()
    names = [(one.target.name, one.draft.name) for one in known]
    targets, drafts = map(set, zip(*names, strict=True))
    # T5Gemma 2 is a ladder, whose smallest model is the draft that auto takes.
    ladder = "google/t5gemma-2-{0}-{0}".format
    assert len({*names}) == len(known) == len(targets) + 1
    assert targets & drafts == {ladder("1b")}
    assert draft_for(ladder("4b")) == draft_for(ladder("1b")) == ladder("270m")
    assert {one.use for one in known} == {"", *USES}
    for one in known:
        # A distilled draft has the encoder of its target, and other costs than weights tell.
        share = 0.7 if "distil" in one.draft.name else 0.4
        assert 0 < one.draft.billions < share * one.target.billions, one
        assert one.target.name.count("/") == one.draft.name.count("/") == 1, one
        assert set(one.drafters) <= set(KINDS), one
        assert bool(one.use) == bool(one.target.config) == bool(one.draft.config), one


def test_sizes_of_the_table_are_those_of_the_shapes() -> None:
    models = {side.name: side for one in known_pairs() for side in (one.target, one.draft)}
    shaped = [one for one in models.values() if one.config]
    assert len(shaped) > 10
    for one in shaped:
        made = ModelSource(one.name, one.config, "bfloat16").outline()
        assert made.nbytes / 2e9 == pytest.approx(
            one.billions, rel=0.03 if one.billions > 1 else 0.1
        )
        assert made.cache_nbytes(8192, 0) == pytest.approx(8192 * 1024 * one.kib, rel=0.04)


def test_pairs_that_we_ran_are_those_in_the_repository() -> None:
    run = [one for one in known_pairs() if one.run]
    assert len(run) == 2
    for one in run:
        assert all(resolve(name).is_dir() for name in (one.target.name, *one.drafters.values()))
        assert resolve(one.draft.name).is_dir()


@pytest.mark.parametrize(
    ("memory", "cpu", "chat", "code"),
    [
        (5.7, False, QWEN3("4B", 4), "mlx-community/Qwen2.5-Coder-7B-Instruct-4bit"),
        (10.7, False, QWEN3("8B", 4), "mlx-community/Qwen2.5-Coder-7B-Instruct-8bit"),
        (27.0, False, QWEN3("32B", 4), "mlx-community/Qwen2.5-Coder-32B-Instruct-4bit"),
        (96.0, False, QWEN3("32B", 8), "mlx-community/Qwen2.5-Coder-32B-Instruct-8bit"),
        # A CPU takes a quarter, and has scales and caches in float32.
        (96.0, True, QWEN3("14B", 4), "mlx-community/Qwen2.5-Coder-14B-Instruct-8bit"),
    ],
)
def test_auto_takes_the_best_pair_that_fits_and_says_what_it_downloads(
    run: Run,
    machine: Callable[..., None],
    loads: None,
    memory: float,
    cpu: bool,
    chat: str,
    code: str,
) -> None:
    machine(int(memory * GB), cpu)
    for model, wanted in (("auto", chat), ("auto:chat", chat), ("auto:code", code)):
        done = run("generate", "x", "--model", model)
        said, failed = done.err.splitlines()
        assert failed.startswith(f"error: loading {wanted} with mlx-community/Qwen")
        assert wanted in said and re.search(r"Downloads about [\d.]+ GB from the Hub", said)
    shown = run("pairs")
    assert f"chat --model {chat} --draft-model" in shown.out and f"--model {code} " in shown.out


@pytest.mark.parametrize(
    ("memory", "recommended", "left", "chat", "code"),
    [
        (8, 5.33, 4.0, "HuggingFaceTB/SmolLM2-1.7B-Instruct", "Qwen/Qwen2.5-Coder-3B-Instruct"),
        (24, 16.0, 0.35 * 24 * 1.073741824, "Qwen/Qwen3-14B", "Qwen/Qwen2.5-Coder-14B-Instruct"),
        (64, 48.0, 0.35 * 64 * 1.073741824, "Qwen/Qwen3-32B", "Qwen/Qwen2.5-Coder-32B-Instruct"),
    ],
)
def test_auto_leaves_a_share_of_a_macs_memory_to_the_system(
    machine: Callable[..., None], memory: int, recommended: float, left: float, chat: str, code: str
) -> None:
    total, usable = memory << 30, int(recommended * (1 << 30))
    machine(usable, mac=total)
    assert room() == usable * 15 // 16
    assert room(auto=True) == pytest.approx(min(room(), total - left * GB), abs=2)
    assert [best_for(use)[0].target.name for use in USES] == [chat, code]


def test_auto_leaves_what_was_named_and_takes_bits(
    run: Run, machine: Callable[..., None], loads: None
) -> None:
    machine(12 * GB)
    given = ("generate", "x", "--model", "auto", "--q-bits", 6, "--draft-model")
    assert "loading Qwen/Qwen3-8B with self (6, None)" in run(*given, "self").err
    assert "loading Qwen/Qwen3-8B with Qwen/Qwen3-0.6B (6, 6)" in run(*given, "auto").err
    assert "with None (6, None)" in run(*given, "a", "--regular-decode").err
    prompts = ROOT / "prompts" / "python.jsonl"
    assert f"loading {QWEN3('14B', 4)} with" in run("bench", prompts, "--model", "auto").err


@pytest.mark.parametrize(
    ("nbytes", "flags", "said"),
    [
        (10**9, ("--model", "auto"), "no pair for chat fits: the smallest takes"),
        (10**9, ("--model", "auto:code"), "no pair for code fits"),
        (10**11, ("--model", "auto:verse"), "give auto or auto:code, not 'verse'"),
        (10**11, ("--model", "auto", "--distributed", "tensor"), "knows one machine alone"),
        (10**11, ("--model", "auto"), "HF_HUB_OFFLINE forbids to download it"),
    ],
)
def test_where_auto_cannot_be_had_one_line_says_why(
    run: Run,
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    nbytes: int,
    flags: tuple[str, ...],
    said: str,
) -> None:
    machine(nbytes)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    done = run("generate", "x", *flags)
    [line] = [line for line in done.err.splitlines() if not line.startswith("auto: ")]
    assert (done.code, done.out) == (2, "") and line.startswith("error: ") and said in line


def test_the_command_shows_what_fits_and_what_to_run(
    run: Run, machine: Callable[..., None]
) -> None:
    machine(16 * GB)
    shown = run("pairs").out
    assert "has 15.0 GB for" in shown and "Qwen3-32B" not in shown
    row = next(line for line in shown.splitlines() if line.strip().startswith("Qwen/Qwen3-8B "))
    assert re.search(
        r"7\.\d GB +11\.\d GB +\(\d+\.\d GB\) +Qwen/Qwen3-0.6B +eagle3, dflash, ds", row
    )
    named = run("pairs", "QWEN3-8b").out
    assert "t5" not in named and f"--model {QWEN3('8B', 8)} --draft-model" in named
    assert "z-lab/Qwen3-8B-DFlash-b16 (dflash)" in named
    assert "20.0 tokens/s without drafts, and 1.60 to 1.80 times that with" in named
    assert "Qwen3-32B" in run("pairs", "qwen3-32").out
    whole = strict(run("pairs", "--json").out)
    assert [one["target"] for one in whole["pairs"]] == [one.target.name for one in known_pairs()]
    assert [one["for"] for one in whole["best"]] == ["chat", "code"]
    assert [one["estimate"] for one in whole["best"]] == [None, None]
    [named] = strict(run("pairs", "Qwen3-14B", "--json").out)["best"]
    assert named["estimate"]["target"]["name"] == "Qwen/Qwen3-14B 4 Qwen/Qwen3-0.6B"
    nothing = run("pairs", "gpt-9")
    assert nothing.code == 2 and "no pair with gpt-9" in nothing.err
    machine(GB)
    tiny = run("pairs")
    assert tiny.code == 0 and "no pair for chat fits" in tiny.err and "weights/t5-enfr" in tiny.out


def test_nothing_is_measured_without_a_name_and_the_command_is_named(
    run: Run, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(16 * GB)
    monkeypatch.setattr("mlx_specdec.measure.estimate.estimate", None)
    flags = f"--model {QWEN3('14B', 4)} --draft-model {QWEN3('0.6B', 4)}"
    assert f"  What it gains here: mlx-specdec estimate {flags}\n" in run("pairs").out


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_names_can_be_copied_from_a_narrow_terminal(
    run: Run, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    machine(16 * GB)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(render, "console_for", lambda stream: Console(file=stream, markup=False))
    shown = run("pairs").out
    for one in known_pairs():
        if one.nbytes(4) <= room():
            assert re.search(rf"^  {one.target.name} .*{one.draft.name} ", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        ("qwen3-8b", "Qwen/Qwen3-0.6B"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-0.6B"),
        ("./models/Qwen3-32B-MLX-bf16/", "Qwen/Qwen3-0.6B"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "meta-llama/Llama-3.2-1B-Instruct"),
        ("t5-large", "google-t5/t5-small"),
    ],
)
def test_a_target_is_known_whoever_copied_it(target: str, draft: str) -> None:
    assert draft_for(target) == draft


def test_auto_names_the_draft_that_is_loaded(run: Run, loads: None) -> None:
    arguments = ("generate", "x", "--model", "google/flan-t5-xl", "--draft-model", "auto")
    assert run(*arguments).err == "error: loading google/flan-t5-xl with google/flan-t5-small\n"
    assert "has no draft for a/b" in run("bench", "--model", "a/b", "--draft-model", "auto").err


@pytest.mark.parametrize(
    ("command", "loaded"),
    [
        (("generate",), "weights/t5-enfr with weights/t5-enfr-draft"),
        (("generate", "--draft-model", "self"), "weights/t5-enfr with self"),
        (("serve", "--port", 0), "weights/t5-enfr with weights/t5-enfr-draft"),
        (("serve", "--port", 0, "--proposer", "none"), "weights/t5-enfr with None"),
        (("chat",), "weights/t5-enfr with weights/t5-enfr-draft"),
        (("chat", "--model", "weights/py-llama"), "weights/py-llama with None"),
    ],
)
def test_without_a_name_the_shipped_models_are_loaded(
    run: Run, loads: None, command: tuple[object, ...], loaded: str
) -> None:
    done = run(*command)
    assert done.code == 2 and done.err.endswith(f"error: loading {loaded}\n")


@pytest.mark.parametrize("command", ["generate", "bench", "calibrate", "estimate", "serve", "chat"])
def test_without_the_sample_models_a_pair_has_to_be_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    done = run(command)
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
    assert "--model google/flan-t5-large" in done.err and "mlx-specdec pairs" in done.err


@pytest.mark.parametrize(
    ("architecture", "slow"), [("applegpu_g14s", True), ("applegpu_g15d", False)]
)
def test_the_command_says_that_drafts_gain_little_on_an_old_gpu(
    architecture: str,
    slow: bool,
    machine: Callable[..., None],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(20 * GB, mac=32 * GB)
    monkeypatch.setattr(mx, "device_info", lambda device=None: {"architecture": architecture})
    output = " ".join(run("pairs").out.split())
    assert ("The GPU of an M1 or M2" in output) == slow
