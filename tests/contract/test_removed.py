"""What release 0.4 gave up says in one line what to use instead."""

from pathlib import Path

import pytest

from .support import command


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("generate", "x", "--simulate-acceptance", 0.5), "estimate shows the gain"),
        (("bench", "--simulate-acceptance=0.5"), "estimate shows the gain"),
        (("estimate", "--seconds", 9), "estimate computes with sizes"),
        (("estimate", "-m", 9), "estimate computes with sizes"),
        (("estimate", "--distributed", 2), "docs/clusters.md says which links pay"),
        (("generate", "x", "--margins"), "benchmarks/margins.py"),
        (("bench", "--baselines"), "benchmarks/compare.py"),
        (("bench", "--peers"), "benchmarks/compare.py"),
        (("bench", "--report", "x.html"), "--plot FILE draws the speeds"),
        (("inspect", "x", "--probe"), "benchmarks/probe.py"),
        (("inspect", "x", "--model", "y"), "benchmarks/probe.py"),
        (("bench", "--warmup", 2), "one text, or one batch, of each method never counts"),
        (("generate", "--ngram-choice", "frequent"), "lookup takes the latest continuation"),
        (("serve", "--keep-billing-lines"), "never reach the prompt"),
        (("serve", "--per-request-spec-decode-metrics", "summary"), "answers have timings"),
        (("serve", "--prompt-cache-disk", "9GB"), "a quarter of the free space"),
        (("generate", "--status-file", "x"), "launch exits with the code of rank 0"),
        (("convert", "--max-shard-size", "1GB"), "a file has 4 GB"),
        (("convert", "--upload-repo", "me/x"), "hf upload USER/NAME DIRECTORY"),
        (("convert", "--upload-repo", "me/x"), "hf upload USER/NAME DIRECTORY"),
        (("convert", "--verify"), "every tensor is compared anyway"),
        (("train-draft", "--divergence", "jsd"), "KL(target || draft)"),
        (("train-draft", "--width", 64), "begin with --layers"),
        (("train-medusa", "--patience", 3), "two epochs without progress"),
        (("train-medusa", "--texts-at-once", 3), "16 texts in one pass"),
        (("train-draft", "--temperature", "0"), "at temperature 0, 0.7 and 1"),
        (("train-medusa", "--seed", 3), "the seed is 0"),
        (("launch", "--mode", "pipeline"), "give --distributed pipeline"),
        (("generate", "x", "--speculate", 3), "--num-draft N, without a draft model"),
        (("launch", "--show"), "the command of mlx.launch"),
        (("launch", "--starting-port", 1), "start with mlx.launch"),
        (("chat", "--posterior-alpha", 0.2), "Options(rule='typical', posterior_alpha=...)"),
        (("serve", "--posterior-threshold", 0.2), "posterior_threshold=...)"),
    ],
)
def test_a_removed_flag_says_what_to_use_instead(words: tuple[object, ...], instead: str) -> None:
    flag = next(str(word).split("=")[0] for word in words if str(word).startswith("-"))
    command(*words).refuses(f"{flag} was removed in release 0.4: ", instead)


def test_a_flag_that_never_was_has_no_such_sentence() -> None:
    command("generate", "--warmup", 2).refuses("No such option: --warmup")


@pytest.mark.parametrize(
    "arguments", [("generate", "x", "--model"), ("convert", "--model"), ("inspect",)]
)
def test_a_model_in_metas_own_layout_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for name in ("consolidated.00.pth", "params.json"):
        (tmp_path / name).write_bytes(b"{}")
    command(*arguments, tmp_path).refuses("Meta's own layout", "Hugging Face's format")


@pytest.mark.parametrize("name", ["self", "self:2"])
@pytest.mark.parametrize("words", [("generate", "x"), ("serve", "--port", 0), ("estimate",)])
def test_a_draft_of_the_targets_own_layers_is_one_sentence(
    words: tuple[object, ...], name: str
) -> None:
    command(*words, "--draft-model", name).refuses(
        f"{name}: drafts made of the target's own layers were removed in release 0.4: train a draft"
    )
