import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.checkpoints.source import names_of, resolve, resolve_config
from mlx_specdec.engine import loading
from mlx_specdec.errors import SourceError


def sentence(name: str, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        resolve(name, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "broken link" in sentence(str(tmp_path / "link"))


@pytest.mark.parametrize(
    "name",
    ["", "a/b/c", "/none/here", "./none", "~nobody/none", "weights/none", "x\ny", "long " * 1000],
)
def test_what_can_be_no_hub_name_is_named(name: str) -> None:
    assert "there is no directory" in sentence(name)


def test_what_came_with_the_program_is_meant_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = Path(__file__).parents[2] / "weights" / "py-llama"
    monkeypatch.chdir(tmp_path)
    assert resolve("weights/py-llama") == resolve_config("weights/py-llama") == shipped
    local = Path("weights/py-llama")
    local.mkdir(parents=True)
    assert resolve("weights/py-llama") == local


def resolve_in_a_process(name: str, home: Path, **settings: str) -> str:
    """The real huggingface_hub, with settings that it reads only once."""
    script = (
        "import sys\n"
        "from mlx_specdec.checkpoints.source import resolve\n"
        "from mlx_specdec.errors import SourceError\n"
        f"try:\n    resolve({name!r})\n"
        "except SourceError as problem:\n    print(problem)\n"
    )
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "roxy" not in k}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**cleared, "HF_HOME": str(home), **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_offline_and_not_in_the_cache_says_so(tmp_path: Path) -> None:
    printed = resolve_in_a_process("some/model", tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in printed and printed.count("\n") == 1


def test_a_directory_needs_no_hub_library(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from mlx_specdec.checkpoints.source import resolve\n"
        f"resolve({str(tmp_path)!r})\n"
        "assert 'huggingface_hub' not in sys.modules and 'mlx.core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_time_of_a_download_is_not_called_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, clock = Path(__file__).parents[2] / "weights" / "t5-enfr-draft", [0.0]

    def download(name: str, **options: Any) -> Path:
        clock[0] += 100
        return directory

    monkeypatch.setattr(loading, "resolve", download)
    monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert loading.load("some/model", "some/draft").load_seconds == 0


def test_a_local_model_has_one_first_name_wherever_the_program_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "weights" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    typed = {tmp_path: "weights/tiny", model.parent: "tiny/", model: ".", Path("/"): str(model)}
    for place, name in typed.items():
        monkeypatch.chdir(place)
        first, *rest = names_of(name)
        assert first == "tiny"
        assert {"weights/tiny", str(model)} <= {*rest} and (name in rest or name == first)
    monkeypatch.chdir("/")
    assert names_of("weights/t5-enfr")[:2] == ("t5-enfr", "weights/t5-enfr")


def test_a_name_on_the_hub_stays_as_it_is() -> None:
    assert names_of("google/flan-t5-small") == ("google/flan-t5-small",)
