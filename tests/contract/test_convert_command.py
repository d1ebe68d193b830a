"""`convert`: a result that generates the same completion, or one line and nothing on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.hub_server import Hub, serve
from .support import ROOT, Outcome, checkpoint, command
from .translators import translator

PROMPT = "Les pates a midi"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {"t5": translator(place / "t5"), "llama": checkpoint(place / "llama")}


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def text_of(model: object) -> str:
    done = command("generate", PROMPT, "--model", model, "-m", 20, "--quiet", "--no-cost-cache")
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_converted_model_writes_the_same_completion(models: dict[str, Path], family: str) -> None:
    done = command("convert", "--model", models[family])
    assert (done.code, done.out) == (0, "")
    assert "largest difference 0" in done.err and "log-probabilities" in done.err
    assert text_of(models[family]) == text_of(f"weights/{family}")


def test_quantized_results_tell_what_became_of_the_model(models: dict[str, Path]) -> None:
    flags = ("--mlx-path", "q4", "-q", "--q-mode", "mxfp4")
    done = command("convert", "--model", models["t5"], *flags)
    assert done.code == 0 and "mxfp4" in done.err and "perplexity" in done.err
    back = command("convert", "--model", "q4", "--mlx-path", "out", "--dequantize")
    assert back.code == 0 and "dequantized" in back.err
    assert text_of("out") == text_of("q4")


def start(address: str, *flags: str) -> "subprocess.Popen[str]":
    """Start `convert` with a Hub at this address, and with huggingface_hub's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "roxy" not in k}
    Path("here").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "convert.py"), *flags],
        env={**kept, "HF_HOME": str(Path("home").resolve()), "HF_ENDPOINT": address},
        cwd="here",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def convert(address: str, *flags: str) -> Outcome:
    with start(address, *flags) as running:
        out, err = running.communicate()
    return Outcome(running.returncode, out, err)


def test_a_model_of_the_hub_is_converted_by_its_name_even_after_a_killed_download(
    models: dict[str, Path],
) -> None:
    files = {file.name: file.read_bytes() for file in models["t5"].iterdir()}
    hub = Hub(files)
    hub.trickles = True
    with serve(hub) as address:
        with start(address, "--model", "some/model") as running:
            assert hub.trickled.wait(60)
            running.kill()
        assert list(Path("here").rglob("*")) == []
        assert not list(Path("home").rglob("model.safetensors"))
        hub.trickles = False
        done = convert(address, "--model", "some/model")
    assert done.code == 0, done.err
    written = Path("here/weights/model")
    assert {"config.json", "model.safetensors"} <= {file.name for file in written.iterdir()}
    assert (written / "tokenizer.json").read_bytes() == files["tokenizer.json"]
