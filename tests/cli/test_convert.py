"""The convert command: a result that generates the same text, or one line and nothing on disk."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.checkpoints import write_t5
from ..support.commands import Run, fails
from ..support.hub_server import Hub, serve

PROMPT = "Les pates a midi"


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_converted_model_writes_the_same_text(
    run: Run, family: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(family)
    done = run("convert", "--model", source)
    path = Path("weights") / source.name
    assert done.code == 0 and done.out == ""
    assert "largest difference 0" in done.err and "log-probabilities" in done.err
    texts = [
        run("generate", PROMPT, "--model", model, "-m", 30, "--quiet").out
        for model in (source, path)
    ]
    assert texts[0] == texts[1]


def test_quantized_results_tell_what_became_of_the_text(run: Run, t5: Path) -> None:
    arguments = ("--model", t5, "--mlx-path", "q4", "-q", "--q-mode", "mxfp4")
    done = run("convert", *arguments)
    assert done.code == 0 and "mxfp4" in done.err and "perplexity" in done.err
    back = run("convert", "--model", "q4", "--mlx-path", "out", "--dequantize")
    assert back.code == 0 and "dequantized" in back.err
    assert run("generate", PROMPT, "--model", "out", "-m", 9, "--quiet").code == 0


def test_an_existing_result_is_only_replaced_when_requested(run: Run, t5: Path) -> None:
    assert run("convert", "--model", t5, "--mlx-path", "out").code == 0
    again = run("convert", "--model", t5, "--mlx-path", "out")
    assert again.code == 2 and "--overwrite" in again.err
    arguments = ("--model", t5, "--mlx-path", "out", "--overwrite", "--dtype", "bfloat16")
    assert run("convert", *arguments).code == 0


@pytest.mark.parametrize(
    ("prepare", "flags", "part"),
    [
        (None, ("--quantize", "--q-bits", "7"), "q-bits"),
        (None, ("--quantize", "--q-group-size", "48"), "q-group-size"),
        (None, ("--dtype", "float8"), "--dtype"),
        (None, ("--q-mode", "fp9"), "--q-mode"),
        (None, ("--quant-predicate", "mixed_3_6"), "--quantize"),
        (None, ("--dequantize",), "not quantized"),
        (None, ("--upload-repo", "nobody"), "USER/NAME"),
        (lambda d: (d / "config.json").unlink(), (), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), (), "safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"1234"), (), "truncated"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    run: Run, t5: Path, tmp_path: Path, prepare, flags, part: str
) -> None:
    source = Path(shutil.copytree(t5, tmp_path / "source"))
    if prepare is not None:
        prepare(source)
    before = listing(tmp_path)
    fails(run("convert", "--model", source, "--mlx-path", tmp_path / "out", *flags), part)
    assert listing(tmp_path) == before


# The command line against a Hub on loopback: what a user sees.


def start(address: str, directory: Path, *flags: str) -> subprocess.Popen[str]:
    """The convert command in a directory of its own, with huggingface_hub's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "roxy" not in k}
    here = directory / "here"
    here.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[2] / "convert.py"), *flags],
        env={**kept, "HF_HOME": str(directory / "home"), "HF_ENDPOINT": address},
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def convert(address: str, directory: Path, *flags: str) -> tuple[int, str, str]:
    """Its exit code and what it wrote to both streams."""
    with start(address, directory, *flags) as running:
        out, err = running.communicate()
    return running.returncode, out, err


def test_a_model_of_the_hub_is_converted_by_its_name(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "source")
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    with serve(Hub(files)) as address:
        code, _, err = convert(address, tmp_path, "--model", "some/model")
    assert code == 0, err
    written = tmp_path / "here" / "weights" / "model"
    assert {"config.json", "model.safetensors", "spiece.model"} <= {
        f.name for f in written.iterdir()
    }
    assert (written / "spiece.model").read_bytes() == files["spiece.model"]


@pytest.mark.slow
def test_a_download_that_was_killed_leaves_no_model_and_is_made_good(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "source")
    hub = Hub({file.name: file.read_bytes() for file in source.iterdir()})
    hub.trickles = True
    with serve(hub) as address:
        with start(address, tmp_path, "--model", "some/model") as running:
            assert hub.trickled.wait(60)
            running.kill()
        assert list((tmp_path / "here").rglob("*")) == []
        assert not list((tmp_path / "home").rglob("model.safetensors"))
        hub.trickles = False
        code, _, err = convert(address, tmp_path, "--model", "some/model")
    assert code == 0, err
