"""The flags that release 0.4 removed. The error for such a flag says what to use instead."""

TRAIN = ("train-draft", "train-medusa")
INSTEAD = {
    "--margins": "benchmarks/margins.py in a clone of the repository scores a text again",
    **dict.fromkeys(
        ("bench --baselines", "bench --peers"),
        "benchmarks/compare.py in a clone of the repository measures other programs",
    ),
    "bench --report": "--plot FILE draws the speeds, and --json prints all figures",
    **dict.fromkeys(
        ("inspect --probe", "inspect --model", "inspect --model-name", "inspect --prompts"),
        "benchmarks/probe.py in a clone of the repository tries a drafter's layers",
    ),
    **dict.fromkeys(
        ("estimate --max-tokens", "estimate -m", "estimate --turns", "estimate --seconds"),
        "estimate computes with sizes, and measures the speed of a matrix for a second",
    ),
    **dict.fromkeys(
        ("estimate --distributed", "estimate --link-us", "estimate --pipeline"),
        "docs/clusters.md says which links pay, and bench measures the running cluster",
    ),
    "--simulate-acceptance": "estimate shows the gain for several acceptance rates, and bench "
    "measures it",
    "--prompt-cache-disk": "--prompt-cache-dir takes a quarter of the free space, at most 32 GiB",
    "--status-file": "mlx-specdec launch exits with the code of rank 0",
    "convert --max-shard-size": "a file has 4 GB, or a quarter of a small machine's memory",
    "convert --upload-repo": "`hf upload USER/NAME DIRECTORY` uploads the result",
    "convert --verify": "every tensor is compared anyway, and the models' output if that is quick",
    "--divergence": "drafts learn by the forward divergence, KL(target || draft)",
    "--patience": "training ends after two epochs without progress",
    "--texts-at-once": "the model writes 16 texts in one pass",
    "--width": "begin with --layers of the target, or with --draft-model",
    **dict.fromkeys(
        (f"{command} {flag}" for command in TRAIN for flag in ("--temperature", "--temp")),
        "one third of the texts each is written at temperature 0, 0.7 and 1",
    ),
    **{f"{command} --seed": "the seed is 0" for command in TRAIN},
    "launch --mode": "give --distributed pipeline to the command behind --",
    "launch --show": "docs/clusters.md has the command of mlx.launch",
    "launch --starting-port": "start with mlx.launch, which has this flag; see docs/clusters.md",
    "bench --warmup": "one text, or one batch, of each method never counts",
    "--ngram-choice": "lookup takes the latest continuation; in Python, Options(ngram_choice=...)",
    "--keep-billing-lines": "these lines never reach the prompt: they defeat the prompt cache",
    "--per-request-spec-decode-metrics": "answers have timings, and /metrics has vLLM's figures",
    "--posterior-alpha": "in Python, Options(rule='typical', posterior_alpha=...)",
    "--posterior-threshold": "in Python, Options(rule='typical', posterior_threshold=...)",
}
"""A flag, after the command if other commands still have it -> what to use instead. An entry stays
for one release. docs/upgrading.md has the same table."""


def advice(command: str | None, option: str) -> str | None:
    """Return the error for a flag that a command does not have, or None if it never had it."""
    instead = INSTEAD.get(f"{command} {option}") or INSTEAD.get(option)
    return None if instead is None else f"{option} was removed in release 0.4: {instead}"
