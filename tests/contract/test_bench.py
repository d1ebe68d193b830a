"""`bench` measures what it is asked for, compares the completions, and prints a table and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from ..support.speculators import dflash, eagle3
from .interruption import each_computation, interrupted
from .support import Outcome, checkpoint, command, moved
from .translators import translator

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ end }}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, drafts and drafters for it, a translator with a draft, and two
    prompts."""
    place = tmp_path_factory.mktemp("bench")
    target = checkpoint(place / "target")
    checkpoint(place / "chat", template=TEMPLATE)
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    for name, draft in (("one", 0.02), ("two", 0.3)):
        moved(target, place / name, draft)
    eagle3(place / "eagle", vocabulary=size)
    dflash(place / "block", vocabulary=size, markov="gated")
    moved(translator(place / "t5"), place / "t5-draft")
    checkpoint(place / "turns", "recurrent_gemma")
    rows = [{"category": name, "prompt": f"{name} words"} for name in ("short", "longer")]
    (place / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def words(place: Path, *models: str, file: str = "prompts.jsonl") -> tuple[object, ...]:
    """Return the arguments that measure a target with these drafts."""
    target, *drafts = (place / name for name in models)
    pairs = (word for draft in drafts for word in ("--draft-model", draft))
    return ("bench", place / file, "--model", target, *pairs, "-m", 6, "--no-cost-cache")


def measured(*arguments: object) -> tuple[dict[str, Any], Outcome]:
    done = command(*arguments, "--json")
    assert done.code == 0, done.err

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(done.out, parse_constant=refuse), done


def test_every_method_is_measured_and_its_completions_are_compared(place: Path) -> None:
    pair = words(place, "t5", "t5-draft")
    found, done = measured(*pair, "--num-draft", "2,auto", "--repeats", 2)
    plain, *drafted = found["methods"]
    names = [method["name"] for method in found["methods"]]
    assert names == ["plain", "draft 2", "draft auto", "auto"]
    assert plain["speed_up"] == pytest.approx(1.0)
    for method in drafted:
        low, high = method["spread"]
        assert 0 < low <= high and method["speed_up"] > 0 and method["tokens_per_second"] > 0
        assert method["texts"] == 2 and method["compared"] == 4 and method["differences"] == []
        assert set(method["by_category"]) == {"short", "longer"}
    assert 0 <= drafted[0]["acceptance_rate"] <= 1 <= drafted[0]["tokens_per_round"] <= 3
    assert "spread" in done.err and "draft 2" in done.err


def test_what_the_chat_template_gets_counts_for_every_method(place: Path) -> None:
    said = ("--system-prompt", "be brief", "--chat-template-config", '{"end": "!"}')
    pair = words(place, "chat")
    found, _ = measured(*pair, "--num-draft", 3, "--repeats", 1, *said)
    assert found["methods"][1]["differences"] == []


@pytest.mark.parametrize(
    ("drafts", "proposers", "names"),
    [
        (("eagle",), (), ["eagle3 3"]),
        (("eagle", "block", "one"), (), ["eagle3 3", "dspark 3", "draft 3"]),
        (
            ("eagle", "block", "one"),
            ("draft", "dspark", "ngram"),
            ["draft 3", "dspark 3", "ngram 3"],
        ),
        (("one", "two"), ("draft",), ["draft 3, {}/one", "draft 3, {}/two"]),
        (("eagle", "one"), ("auto",), ["auto 3, {}/eagle", "auto 3, {}/one"]),
    ],
)
def test_every_draft_is_measured_and_lookup_once(
    place: Path, drafts: tuple[str, ...], proposers: tuple[str, ...], names: list[str]
) -> None:
    chosen = (word for name in proposers for word in ("--proposer", name))
    pairs = words(place, "target", *drafts)
    found, _ = measured(*pairs, *chosen, "--num-draft", 3, "--repeats", 1, "--limit", 1)
    expected = ["plain", *(name.format(place) for name in names)]
    assert [method["name"] for method in found["methods"]] == expected
    assert all(method["differences"] == [] for method in found["methods"])


@pytest.mark.parametrize(
    ("models", "sizes", "temperature"),
    [
        (("t5", "t5-draft"), "4, 2,4", 0),
        (("target", "one"), "4,2", 1),
        (("turns",), "2,4", 0),
    ],
)
def test_throughput_is_measured_at_every_batch_size(
    place: Path, models: tuple[str, ...], sizes: str, temperature: int
) -> None:
    kind = "draft" if len(models) > 1 else "ngram"
    how = ("--num-draft", 2, "--proposer", kind, "--temp", temperature)
    pair = words(place, *models)
    found, done = measured(*pair, "--batch-size", sizes, "--repeats", 1, *how)
    assert [method["name"] for method in found["methods"]] == [
        "plain, batch 1",
        "plain, batch 2",
        f"{kind} 2, batch 2",
        "plain, batch 4",
        f"{kind} 2, batch 4",
    ]
    assert found["texts"] == 2 and f"{kind} 2, batch 4" in done.err
    for method in found["methods"]:
        assert (method["compared"], method["differences"]) == (2, [])
        assert method["tokens_per_second"] > 0 and method["peak_memory_bytes"] > 0
    in_turns = f"texts were made in turns: {place / models[0]} cannot take several sequences"
    assert (in_turns in " ".join(found["setting"]["notes"])) == (models == ("turns",))


def test_ctrl_c_keeps_what_was_measured(place: Path) -> None:
    pair = (*words(place, "target", "one"), "--num-draft", 2, "--repeats", 4, "--json")
    asked: list[int] = []
    with each_computation(asked.append):
        assert command(*pair).code == 0
    with interrupted(lambda count: count == round(0.6 * len(asked))):
        done = command(*pair)
    found = json.loads(done.out)
    assert done.code == 130 and found["interrupted"] and "; interrupted" in done.err
    assert 0 < found["methods"][1]["compared"] < 8 and found["methods"][1]["speed_up"] > 0
    with interrupted(lambda count: count == round(0.1 * len(asked))):
        done = command(*pair)
    assert (done.code, done.out) == (130, "")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(place: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"speed.{suffix}"
    done = command(*words(place, "target"), "--num-draft", "1,2", "--plot", file)
    assert done.code == 0 and f"plot: {file}" in done.err
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")
