"""The table of pairs: shown, searched by name, and used by --model auto and --draft-model auto."""

import datetime
import importlib
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from rich.console import Console

from mlx_specdec.checkpoints import disk
from mlx_specdec.checkpoints.source import resolve
from mlx_specdec.cli import loading, render
from mlx_specdec.cli.known_pairs import (
    BITS,
    COMPETING,
    DRAFT,
    MTP,
    USES,
    best_for,
    draft_for,
    known_pairs,
    mac,
    this_machine,
)
from mlx_specdec.errors import OptionError
from mlx_specdec.models import families, number_format
from mlx_specdec.models.drafters import KINDS

from ..support.commands import Run, strict
from ..support.shipped import ROOT

GB = 10**9
QWEN3 = "mlx-community/Qwen3-{}-{}bit".format


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say what this machine is: bytes for models, whether it has no accelerator, and of a Mac the
    memory."""

    def pretend(nbytes: int, cpu: bool = False, mac: int | None = None) -> None:
        monkeypatch.setattr(mx.metal, "is_available", lambda: mac is not None)
        monkeypatch.setattr(disk, "usable_memory", lambda: nbytes)
        monkeypatch.setattr(disk, "memory", lambda: mac or nbytes)
        monkeypatch.setattr(number_format, "on_cpu", lambda: cpu)

    return pretend


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, draft_model: str | None, **rest: object) -> None:
        bits = rest.get("q_bits"), rest.get("draft_q_bits")
        raise OptionError(f"loading {model} with {draft_model}" + (f" {bits}" if any(bits) else ""))

    monkeypatch.setattr("mlx_specdec.engine.loading.load", load)


def test_the_table_is_consistent() -> None:
    known = known_pairs()
    assert len({(one.target.name, one.draft.name) for one in known}) == len(known)
    drafts = {one.draft.name for one in known}
    # T5Gemma 2 is a ladder, whose smallest model is the draft that auto takes.
    ladder = "google/t5gemma-2-{0}-{0}".format
    assert {one.target.name for one in known} & drafts == {ladder("1b")}
    assert draft_for(ladder("4b")) == draft_for(ladder("1b")) == ladder("270m")
    assert {one.uses for one in known} == {(), USES, USES[:1], USES[1:]}
    today = datetime.date.today()
    for one in known:
        # A distilled draft has the encoder of its target, which costs nothing in a round.
        share = 0.7 if "distil" in one.draft.name else 0.4
        assert 0 <= one.draft.billions < share * one.target.billions, one
        assert one.target.name.count("/") == 1, one
        assert one.kind in (DRAFT, *KINDS) and (one.kind == MTP) == (one.draft.name == MTP), one
        assert one.kind == MTP or one.draft.name.count("/") == 1, one
        assert bool(one.draft.billions) or not one.gains, one
        assert one.source is not None or not (one.gains or one.tokens), one
        assert one.source is None or datetime.date.fromisoformat(one.source.date) <= today, one
        assert {*one.gains} <= {*one.target.bits} <= {*BITS}, one
        assert all(0.3 < gain < 6 for gains in one.gains.values() for gain in gains.values()), one


def test_every_model_of_the_table_has_a_family_that_can_be_loaded() -> None:
    utils = importlib.import_module("mlx_lm.utils")
    for one in known_pairs():
        for model in (one.target, one.draft):
            if not model.type:
                assert model is one.draft and one.kind != DRAFT
            elif not families.is_encoder_decoder({"model_type": model.type}):
                assert utils._get_classes({"model_type": model.type}), model


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("size", [8, 16, 24, 32, 48, 64, 96, 128])
def test_each_size_of_macs_has_a_choice_that_fits_and_gains_most(size: int, use: str) -> None:
    machine = mac(f"{size}GB")
    chosen, bits = best_for(use, None, machine)
    room = machine.auto_room
    assert chosen.nbytes(bits, False) <= room < size << 30
    gain = chosen.gain(bits, use)
    assert gain is not None and gain > 1.4
    for one in known_pairs():
        for n in {*BITS[:2]} & {*one.target.bits}:
            other = one.gain(n, use)
            confirmed = use in one.uses and not one.target.unconfirmed
            if confirmed and other and one.nbytes(n, False) <= room:
                assert chosen.target.size >= COMPETING * one.target.size
                small = one.target.size < chosen.target.size
                assert other <= gain or small, (one, n)


def test_the_choices_of_today() -> None:
    """Change this when the table changes, and the table in README.md with it."""
    taken = {}
    for size in (8, 16, 24, 32, 48, 64, 96, 128):
        for use in USES:
            one, bits = best_for(use, None, mac(f"{size}GB"))
            taken[size, use] = (one.target.name.partition("/")[2], bits, one.kind)
    large = {(size, "chat"): ("Qwen3.8-27B", 8, "dflash2") for size in (48, 64, 96, 128)}
    large |= {(size, "code"): ("Qwen3.8-27B", 8, "dspark") for size in (48, 64, 96, 128)}
    assert taken == large | {
        (8, "chat"): ("LFM2.5-2.6B", 8, "dspark"),
        (8, "code"): ("MiniCPM5-2B", 8, "dspark"),
        (16, "chat"): ("Qwen3.5-9B", 4, "mtp"),
        (16, "code"): ("Qwen3.5-9B", 4, "mtp"),
        (24, "chat"): ("Ornith-1.0-9B", 8, "dspark"),
        (24, "code"): ("Ornith-1.0-9B", 8, "dspark"),
        (32, "chat"): ("Qwen3.8-27B", 4, "dspark"),
        (32, "code"): ("Qwen3.8-27B", 4, "dflash2"),
    }


def test_gains_are_published_or_estimated() -> None:
    table = {(one.target.name, one.kind): one for one in known_pairs()}
    small = table["LiquidAI/LFM2.5-2.6B", "dspark"]
    assert small.published_gain(16, "chat") == 2.24
    assert small.published_gain(4, "chat") is None
    # A round at 4 bits costs more plain steps than one at 16 bits.
    assert small.gain(4, "chat") == pytest.approx(2.24 * 1.5 / 1.9)
    assert table["Qwen/Qwen3-32B", "dspark"].gain(8, "code") == pytest.approx(2.9 / 1.5)
    draft = table["Qwen/Qwen3-32B", DRAFT]
    assert draft.gain(4, "chat") == pytest.approx(2.5 / (1.9 + 3 * 0.6 / 32.8))
    assert table["openai/gpt-oss-120b", "peagle"].gain(4, "chat") == pytest.approx(3.15 / 3.3)
    assert table["Qwen/Qwen3-Coder-Next", MTP].gain(8, "code") == pytest.approx(1.8 / 1.5)
    assert table["Qwen/Qwen3-4B", "dflash"].gain(4, "chat") is None
    assert table["google/t5gemma-2-4b-4b", DRAFT].gain(4, "chat") is None


def test_what_is_not_confirmed_or_not_measured_is_not_chosen() -> None:
    known = known_pairs()
    assert {one.target.name for one in known if one.target.unconfirmed} > {
        "Nanbeige/Nanbeige4.2-3B"
    }
    for size in (8, 12, 16, 24, 32, 64, 128):
        for use in USES:
            one, bits = best_for(use, None, mac(f"{size}GB"))
            assert not one.target.unconfirmed and one.gain(bits, use) is not None


def test_pairs_that_we_ran_are_those_in_the_repository() -> None:
    run = [one for one in known_pairs() if one.run]
    assert len(run) == 3
    for one in run:
        assert resolve(one.target.name).is_dir() and resolve(one.draft.name).is_dir()


@pytest.mark.parametrize(
    ("memory", "cpu", "chat", "code"),
    [
        (5.0, False, "LiquidAI/LFM2.5-2.6B", "mlx-community/MiniCPM5-2B-8bit"),
        (10.7, False, "mlx-community/Qwen3.5-9B-MLX-4bit", "mlx-community/Qwen3.5-9B-MLX-4bit"),
        (27.0, False, "mlx-community/Qwen3.8-27B-4bit", "mlx-community/Qwen3.8-27B-4bit"),
        (96.0, False, "mlx-community/Qwen3.8-27B-8bit", "mlx-community/Qwen3.8-27B-8bit"),
        # A CPU takes a quarter, and has scales and caches in float32.
        (96.0, True, "mlx-community/Qwen3.6-27B-4bit", "mlx-community/Qwen3.6-27B-4bit"),
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
        assert failed.startswith(f"error: loading {wanted} with ")
        assert wanted in said and re.search(r"Downloads about [\d.]+ GB from the Hub", said)
        assert re.search(r"Drafts bring (about )?\d\.\d+ times plain decoding for c", said)
    shown = run("pairs")
    assert f"chat --model {chat} --" in shown.out and f"--model {code} " in shown.out


@pytest.mark.parametrize(
    ("memory", "recommended", "left"),
    [(8, 16 / 3, 4.0), (24, 16.0, 0.35 * 24 * 1.073741824), (64, 48.0, 0.35 * 64 * 1.073741824)],
)
def test_auto_leaves_a_share_of_a_macs_memory_to_the_system(
    machine: Callable[..., None], memory: int, recommended: float, left: float
) -> None:
    total, usable = memory << 30, int(recommended * (1 << 30))
    machine(usable, mac=total)
    here, there = this_machine(), mac(f"{memory}gb")
    assert here.room == usable * 15 // 16
    assert here.auto_room == pytest.approx(min(here.room, total - left * GB), abs=2)
    assert (there.room, there.auto_room) == pytest.approx((here.room, here.auto_room), abs=2)


def test_auto_leaves_what_was_named_and_takes_bits(
    run: Run, machine: Callable[..., None], loads: None
) -> None:
    machine(12 * GB)
    given = ("generate", "x", "--model", "auto", "--q-bits", 6, "--draft-model")
    assert "loading Qwen/Qwen3.5-9B with mtp (6, None)" in run(*given, "auto").err
    assert "with None (6, None)" in run(*given, "a", "--regular-decode").err
    prompts = ROOT / "prompts" / "python.jsonl"
    line = run("bench", prompts, "--model", "auto").err
    assert "loading mlx-community/Qwen3.5-9B-MLX-4bit with mtp:Qwen/Qwen3.5-9B" in line


@pytest.mark.parametrize(
    ("nbytes", "flags", "said"),
    [
        (10**9, ("--model", "auto"), "no pair for chat fits: the smallest takes"),
        (10**9, ("--model", "auto:code"), "no pair for code fits"),
        (10**11, ("--model", "auto:verse"), "give auto or auto:code, not 'verse'"),
        (10**11, ("--model", "auto", "--distributed", "tensor"), "knows one machine alone"),
        # The target has to be downloaded first, and not its drafter.
        (10**11, ("--model", "auto"), "hf download mlx-community/Qwen3.8-27B-8bit`"),
        (10**11, ("--model", "a/b", "--revision", "v2"), "hf download a/b --revision v2`"),
        (10**11, ("--model", ROOT / "weights/t5-enfr", "--draft-model", "a/b"), "hf download a/b`"),
    ],
)
def test_if_a_model_cannot_be_had_one_line_says_why(
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
    sizes = r"10\.\d GB +14\.\d GB +\(\d+\.\d GB\)"
    drafter = r"deepseek-ai/dspark_qwen3_8b_block7 +1\.71 / 2\.03 +mlx-dspark on M4 Pro, 48 GB"
    assert re.search(rf"{sizes} +{drafter} +draft, eagle3, dflash", row)
    named = run("pairs", "QWEN3-8b").out
    assert "t5" not in named and f"--model {QWEN3('8B', 8)} --draft-model deepseek-ai/" in named
    assert "Gain: 1.71 times plain decoding for chat, measured by mlx-dspark on M4 Pro" in named
    small = run("pairs", "SmolLM2-1.7B-Instruct").out
    assert "Gain: about 1.4 times plain decoding for chat, an estimate." in small
    assert "Qwen3-32B" in run("pairs", "qwen3-32").out
    nothing = run("pairs", "gpt-9")
    assert nothing.code == 2 and "no pair with gpt-9" in nothing.err
    machine(GB)
    tiny = run("pairs")
    assert tiny.code == 0 and "no pair for chat fits" in tiny.err and "weights/t5-enfr" in tiny.out


def test_the_command_has_one_object_for_programs(run: Run, machine: Callable[..., None]) -> None:
    machine(16 * GB)
    whole = strict(run("pairs", "--json").out)
    assert [one["target"] for one in whole["pairs"]] == [one.target.name for one in known_pairs()]
    assert [one["for"] for one in whole["best"]] == ["chat", "code"]
    assert whole["best"][0]["source"]["by"] == "mlx-dspark"


def test_the_command_shows_what_another_mac_would_run(
    run: Run, machine: Callable[..., None]
) -> None:
    machine(GB, cpu=True)
    there = run("pairs", "--memory", "32GB").out
    assert "Such a machine (a Mac with 32 GB) has 21.5 GB for models" in there
    assert "--model mlx-community/Qwen3.8-27B-4bit --draft-model incoai/" in there
    assert strict(run("pairs", "--memory", "64 gb", "--json").out)["memory_bytes"] == 45 << 30
    assert "is no size" in run("pairs", "--memory", "much").err


def test_the_command_that_estimates_a_pair_is_named(run: Run, machine: Callable[..., None]) -> None:
    machine(16 * GB)
    drafter = "stanleyphoong/Ornith-1.0-9B-DSpark"
    flags = f"--model mlx-community/Ornith-1.0-9B-8bit --draft-model {drafter}"
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
        if one.nbytes(4, False) <= this_machine().room:
            assert re.search(rf"^  {one.target.name} ", shown, re.MULTILINE)
            if one.kind == MTP:
                assert re.search(rf"^  {one.target.name} .* mtp ", shown, re.MULTILINE)
    if columns == 80:
        row = r"^  Qwen/Qwen3-8B +10\.\d GB +dspark +1\.71 / 2\.03 *$"
        assert re.search(row, shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-0.6B-Base"),
        ("qwen3-8b", "deepseek-ai/dspark_qwen3_8b_block7"),
        ("mlx-community/Qwen3-8B-4bit", "deepseek-ai/dspark_qwen3_8b_block7"),
        ("./models/Qwen3-32B-MLX-bf16/", "deepseek-ai/dspark_qwen3_32b_block7"),
        ("mlx-community/Qwen3.8-27B-4bit", "RedHatAI/Qwen3.8-27B-speculator.dspark"),
        ("mlx-community/Qwen3.8-27B-8bit", "incoai/Qwen3.8-27B-DFlash2"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "amazon/GPT-OSS-20B-P-EAGLE"),
        ("Qwen/Qwen3-Coder-Next", "mtp"),
        ("mlx-community/Qwen3-Coder-Next-4bit", "mtp:Qwen/Qwen3-Coder-Next"),
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


@pytest.mark.parametrize("command", ["generate", "bench", "estimate", "serve", "chat"])
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
