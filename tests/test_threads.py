"""A thread that loads and generates leaves nothing of MLX's behind that ends the process badly."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec import Options, generate

from .support.models import make_llama
from .support.pairs import PROMPT, decoder_only

ROOT = Path(__file__).resolve().parents[1]
ENDS = """
import sys, threading
from mlx_specdec import Options, generate, load

def work():
    pair = load(sys.argv[1], sys.argv[2])
    print(*generate(pair, "def f(x):", Options(max_tokens=5)).tokens)

for _ in range(6):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def test_mlx_is_told_when_a_thread_ends_that_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, told, clear = decoder_only("llama"), [], mx.clear_streams
    generate(pair, PROMPT, Options(max_tokens=3))

    def listen() -> None:
        told.append(threading.get_ident())
        clear()

    monkeypatch.setattr(mx, "clear_streams", listen)
    idents = []

    def work() -> None:
        for _ in range(2):
            generate(pair, PROMPT, Options(max_tokens=3))
        assert told == idents
        idents.append(threading.get_ident())

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert told == idents and len(told) == 2


@pytest.mark.slow
def test_a_process_ends_well_whose_threads_have_generated(tmp_path: Path) -> None:
    models = [str(make_llama(tmp_path / name, seed)) for seed, name in enumerate(("one", "other"))]
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, *models],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(set(ended.stdout.splitlines())) == 1
