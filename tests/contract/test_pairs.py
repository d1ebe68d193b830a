"""The table of pairs: shown, searched by name, and used by --model auto and --draft-model auto."""

import datetime
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from .machines import Pretend, pretender
from .support import ROOT, Outcome, command

GB = 10**9
BITS = ("4", "8", "16")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    return pretender(monkeypatch)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def shown(*words: object) -> Any:
    """Return the object that `pairs --json` prints."""
    done = command("pairs", *words, "--json")
    assert (done.code, done.err) == (0, ""), done
    return json.loads(done.out)


@pytest.fixture(scope="module")
def table() -> list[dict[str, Any]]:
    pairs: list[dict[str, Any]] = shown("--memory", "32GB")["pairs"]
    return pairs


def missing(done: Outcome) -> tuple[str, str]:
    """Return the lines about `auto`, and the model whose download was forbidden."""
    assert (done.code, done.out) == (2, "")
    *said, failed = done.err.splitlines()
    found = re.fullmatch(r"error: .*or run `HF_HUB_OFFLINE=0 hf download (.*)`", failed)
    assert found is not None, done
    return "\n".join(said), found[1]


def test_the_table_is_consistent(table: list[dict[str, Any]]) -> None:
    assert len({(one["target"], one["draft"]) for one in table}) == len(table)
    drafts = {one["draft"] for one in table}
    # T5Gemma 2 is a ladder, whose smallest model is the draft that auto takes.
    assert {one["target"] for one in table} & drafts == {"google/t5gemma-2-1b-1b"}
    for one in table:
        # A distilled draft has the encoder of its target, which costs nothing in a round.
        share = 0.7 if "distil" in one["draft"] else 0.4
        assert 0 <= one["draft_billions"] < share * one["target_billions"], one
        assert one["target"].count("/") == 1, one
        assert (one["kind"] == "mtp") == (one["draft"] == "mtp"), one
        assert one["kind"] == "mtp" or one["draft"].count("/") == 1, one
        assert bool(one["draft_billions"]) or not one["gains"], one
        source = one["source"]
        assert source is not None or not one["gains"], one
        today = datetime.date.today()
        assert source is None or datetime.date.fromisoformat(source["date"]) <= today, one
        assert {*one["gains"]} <= {*one["bytes"]} <= {*BITS}, one
        published = [gain for gains in one["gains"].values() for gain in gains.values()]
        assert all(0.3 < gain < 6 for gain in published), one
        assert one["quality"] in "ABCDE", one
        for bits, gains in ({} if one["run"] else one["gains"]).items():
            speeds = one["tokens_per_second"][bits]
            for use, gain in gains.items():
                assert speeds[use] == pytest.approx(gain * speeds["plain"], rel=0.01), one
    ran = [one for one in table if one["run"]]
    assert len(ran) == 3
    assert all((ROOT / one[side]).is_dir() for one in ran for side in ("target", "draft"))


@pytest.mark.parametrize(
    ("memory", "cpu", "chat", "code"),
    [
        (5.0, False, "LiquidAI/LFM2.5-2.6B", "mlx-community/MiniCPM5-2B-8bit"),
        (10.7, False, "deepreinforce-ai/Ornith-1.0-9B", "deepreinforce-ai/Ornith-1.0-9B"),
        (27.0, False, "mlx-community/Qwen3.8-27B-4bit", "mlx-community/Qwen3.8-27B-4bit"),
        (96.0, False, "mlx-community/Qwen3.8-27B-4bit", "mlx-community/Qwen3.8-27B-4bit"),
        # A CPU takes a quarter, and its memory is slow.
        (96.0, True, "LiquidAI/LFM2.5-8B-A1B", "LiquidAI/LFM2.5-8B-A1B"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_auto_takes_the_best_pair_that_fits_and_says_what_it_downloads(
    machine: Pretend, memory: float, cpu: bool, chat: str, code: str
) -> None:
    machine(int(memory * GB), cpu=cpu)
    for model, wanted in (("auto" if cpu else "auto:chat", chat), ("auto:code", code)):
        said, asked = missing(command("generate", "x", "--model", model))
        assert asked == wanted and said.startswith(f"auto: {wanted}")
        assert re.search(r"Downloads about [\d.]+ GB from the Hub", said)
        assert re.search(r"Speed here: about \d+ tokens/s for c\w+, \d+ without drafts; ", said)


@pytest.mark.usefixtures("offline")
def test_auto_leaves_what_was_named_and_takes_bits(machine: Pretend) -> None:
    machine(12 * GB)
    flags = ("--model", "auto", "--q-bits", 6, "--draft-model")
    said, asked = missing(command("generate", "x", *flags, "auto"))
    ornith, drafter = "deepreinforce-ai/Ornith-1.0-9B", "stanleyphoong/Ornith-1.0-9B-DSpark"
    assert asked == ornith and f"at 6 bits, drafts from {drafter}" in said, said
    # The gain at 4 or 8 bits is not announced for 6.
    assert "nobody has published the gain at 6 bits" in said and "2.21" not in said
    said, asked = missing(command("generate", "x", *flags, "a"))
    assert asked == ornith and "at 6 bits, drafts from a;" in said
    prompts = ROOT / "prompts" / "python.jsonl"
    said, asked = missing(command("bench", prompts, "--model", "auto"))
    assert asked == ornith and f"at 4 bits, drafts from {drafter}" in said
    said, asked = missing(command("generate", "x", "--model", "auto:fast"))
    assert asked == "mlx-community/LFM2.5-1.2B-Instruct-8bit" and " for chat, " in said


@pytest.mark.parametrize(
    ("nbytes", "flags", "said"),
    [
        (10**9, "--model auto", "no pair for chat fits: the smallest takes"),
        (10**9, "--model auto:code", "no pair for code fits"),
        (10**11, "--model auto:verse", "give auto, auto:code or auto:fast, not auto:verse"),
        (10**11, "--model auto --distributed tensor", "knows one machine alone"),
        # The target has to be downloaded first, and not its drafter.
        (10**11, "--model auto", "hf download mlx-community/Qwen3.8-27B-4bit`"),
        (10**11, "--model a/b --revision v2", "hf download a/b --revision v2`"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_if_a_model_cannot_be_had_one_line_says_why(
    machine: Pretend, nbytes: int, flags: str, said: str
) -> None:
    machine(nbytes)
    done = command("generate", "x", *flags.split())
    lines = [line for line in done.err.splitlines() if not line.startswith("auto: ")]
    Outcome(done.code, done.out, "\n".join(lines) + "\n").refuses(said)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen3-8B-Base", "Qwen/Qwen3-0.6B-Base"),
        ("qwen3-8b", "deepseek-ai/dspark_qwen3_8b_block7"),
        ("Qwen3-8B-4bit", "deepseek-ai/dspark_qwen3_8b_block7"),
        ("Qwen3-32B-MLX-bf16", "deepseek-ai/dspark_qwen3_32b_block7"),
        ("Qwen3.8-27B-4bit", "RedHatAI/Qwen3.8-27B-speculator.dspark"),
        ("Qwen3.8-27B-8bit", "incoai/Qwen3.8-27B-DFlash2"),
        ("gpt-oss-20b-MXFP4-Q8", "amazon/GPT-OSS-20B-P-EAGLE"),
        ("Qwen3-Coder-Next-4bit", "Qwen/Qwen3-Coder-Next"),
        ("Meta-Llama-3.1-8B-Instruct-4bit", "meta-llama/Llama-3.2-1B-Instruct"),
        ("t5-large", "google-t5/t5-small"),
        ("flan-t5-xl", "google/flan-t5-small"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_a_target_is_known_whoever_copied_it(
    llama: Path, tmp_path: Path, target: str, draft: str
) -> None:
    """A target here has the name, and the draft that is asked for cannot be downloaded."""
    copy = tmp_path / target
    copy.symlink_to(llama)
    flags = ("--model", f"{copy}/", "--draft-model", "auto")
    assert missing(command("generate", "x", *flags)) == ("", draft)


def test_a_target_of_nobody_has_no_draft() -> None:
    command("bench", "--model", "a/b", "--draft-model", "auto").refuses("has no draft for a/b")


def test_the_command_shows_what_fits_and_what_to_run(machine: Pretend) -> None:
    machine(16 * GB)
    table = command("pairs").out
    assert "has 15.0 GB for" in table and "Qwen3-32B" not in table
    row = next(line for line in table.splitlines() if line.strip().startswith("Qwen/Qwen3-8B "))
    sizes = r"10\.\d GB +14\.\d GB +\(\d+\.\d GB\)"
    drafter = r"deepseek-ai/dspark_qwen3_8b_block7 +4 +\(43 to 58\) +mlx-dspark on M4 Pro, 48 GB"
    assert re.search(rf" C +{sizes} +{drafter} +draft, eagle3, dflash", row)
    contrary = "1.05 on an M3 Ultra (Rapid-MLX#2175); slower on an M2 Pro (Rapid-MLX#2199)"
    assert re.search(rf"Qwen/Qwen3\.5-9B .* 24 to 36 .* {re.escape(contrary)}", table)
    flags = "--model mlx-community/Ornith-1.0-9B-8bit --draft-model stanleyphoong/Ornith-1.0-9B-"
    assert f"  What it gains here: mlx-specdec estimate {flags}DSpark\n" in table
    named = command("pairs", "QWEN3-8b").out
    assert "t5" not in named
    assert "--model mlx-community/Qwen3-8B-4bit --draft-model deepseek-ai/" in named
    # The gain at 8 bits is not announced for 4.
    assert "for chat, 43 without drafts; nobody has published the gain at 4 bits." in named
    machine(16 * GB, mac=16 << 30)
    slow = command("pairs", "Ornith").out
    assert (
        "26.7 to 59.0 tokens/s, 2.21 times plain decoding for chat, measured by mlx-dspark" in slow
    )
    machine(16 * GB)
    small = command("pairs", "SmolLM2-1.7B-Instruct").out
    assert "without drafts; nobody has published the gain at 4 bits." in small
    quantized = "SmolLM2-1.7B-Instruct --q-bits 4 --draft-model HuggingFaceTB/SmolLM2-135M-Instruct"
    assert f"chat --model HuggingFaceTB/{quantized} --draft-q-bits 4\n" in small
    assert "Qwen3-32B" in command("pairs", "qwen3-32").out
    command("pairs", "gpt-9").refuses("no pair with gpt-9")
    assert [one["for"] for one in shown()["best"]] == ["chat", "code"]
    machine(GB)
    tiny = command("pairs")
    assert tiny.code == 0 and "no pair for chat fits" in tiny.err and "weights/t5-enfr" in tiny.out
    there = command("pairs", "--memory", "32GB").out
    assert "Such a machine (a Mac with 32 GB) has 21.5 GB for models" in there
    assert "--model mlx-community/Qwen3.8-27B-4bit --draft-model incoai/" in there
    assert shown("--memory", "64 gb")["memory_bytes"] == 45 << 30
    command("pairs", "--memory", "much").refuses("is no size")


@pytest.mark.parametrize(("chip", "slow"), [("Apple M2 Pro", True), ("Apple M3", False)])
def test_the_command_says_that_drafts_gain_little_on_an_old_gpu(
    machine: Pretend, chip: str, slow: bool
) -> None:
    machine(20 * GB, mac=32 * GB, chip=chip)
    assert ("The GPU of an M1 or M2" in " ".join(command("pairs").out.split())) == slow


@pytest.mark.usefixtures("offline")
def test_bits_that_gain_nothing_on_an_old_gpu_are_refused(machine: Pretend) -> None:
    machine(10 * GB, mac=16 << 30, chip="Apple M2")
    flags = ("generate", "x", "--model", "auto")
    command(*flags, "--q-bits", 4).refuses(
        "an M1 or M2 gains nothing at 4 bits: leave out --q-bits"
    )
    said, asked = missing(command(*flags))
    assert asked == "openbmb/MiniCPM5-2B" and "at 16 bits" in said
    assert (
        "about 39 tokens/s for chat, 19 without drafts; 50.6 to 107.3 tokens/s, 2.12 times" in said
    )


# The demonstration of `generate` without arguments, with a tiny pair under the shipped one's name.


@pytest.fixture
def shipped(t5: Path, t5_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    for name, model in (("t5-enfr", t5), ("t5-enfr-draft", t5_draft)):
        shutil.copytree(model, Path("weights") / name)


@pytest.mark.usefixtures("shipped")
def test_the_demonstration_shows_its_sentence_and_ends_with_a_comparison() -> None:
    done = command("generate", "-m", 20)
    first, *_, last = done.err.splitlines()
    assert done.code == 0 and first.startswith("prompt: translate English to French: Let's go to")
    # The runs that are compared are not the one whose statistics stand above.
    ratio, _, said = last.removeprefix("timed again, 3 times each: ").partition(" times as fast as")
    assert float(ratio) > 0 and "tokens/s), the same text; " in said
    assert "next: mlx-specdec generate" in said or "fast BLAS: " in said
    plain = command("generate", "-m", 20, "--regular-decode")
    as_json = command("generate", "-m", 2, "--json")
    assert done.out == plain.out and json.loads(as_json.out)["draft_model"]
    rest = [command("generate", "-m", 5, *words) for words in (("--quiet",), ("x",), ("-m", 0))]
    for silent in (plain, as_json, *rest):
        assert silent.code == 0 and "times as fast" not in silent.err


@pytest.mark.usefixtures("shipped")
def test_without_a_command_it_generates() -> None:
    flags = ("-m", 3, "--quiet")
    assert command(*flags) == command("generate", *flags)
    for words in (("Hello",), ("Where is it?",)):
        assert command(*words, *flags) == command("generate", *words, *flags)


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("32GB", 32 << 30),  # Apple's GB has 1024 MB
        ("32g", 32 << 30),
        ("32 GiB", 32 << 30),
        ("1.5TB", 3 << 39),
        ("65536 mb", 64 << 30),
        ("34359738368", 32 << 30),
        ("34359738368B", 32 << 30),
    ],
)
def test_a_size_has_a_unit_or_is_large_enough_for_bytes(size: str, nbytes: int) -> None:
    assert shown("--memory", size)["device"] == f"a Mac with {nbytes >> 30} GB"
