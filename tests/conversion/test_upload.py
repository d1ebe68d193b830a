"""What is uploaded, and by whom; no network is touched."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import pytest

from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import OutputError

from ..support import tiny
from ..support.checkpoints import write_t5
from ..support.speculators import eagle3


class Hub:
    """Records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.uploaded: list[tuple[Path, str]] = []
        monkeypatch.setattr(hub.HfApi, "create_repo", self.create)
        monkeypatch.setattr(hub.HfApi, "upload_folder", self.upload)

    def create(self, *, repo_id: str, exist_ok: bool) -> None:
        self.made.append(repo_id)

    def upload(self, *, folder_path: str, repo_id: str, repo_type: str) -> None:
        self.uploaded.append((Path(folder_path), repo_id))


@pytest.mark.parametrize("write", [write_t5, partial(tiny.write, "llama")])
def test_a_model_is_uploaded_whole_with_a_card_that_names_this_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    api = Hub(monkeypatch)
    convert(str(write(tmp_path / "source")), tmp_path / "out", upload_repo="me/model")
    assert api.made == ["me/model"] and api.uploaded == [(tmp_path / "out", "me/model")]
    card = hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "mlx" and card.data.base_model is None
    assert "mlx-specdec generate --model me/model" in card.text


def test_a_drafter_is_uploaded_with_a_card_that_says_how_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Hub(monkeypatch)
    convert(str(eagle3(tmp_path / "a")), tmp_path / "out", upload_repo="me/drafter")
    assert api.uploaded == [(tmp_path / "out", "me/drafter")]
    card = hub.ModelCard.load(tmp_path / "out" / "README.md").text
    assert "generate --model TARGET --draft-model me/drafter" in card


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        (RuntimeError("401 Client Error\nmore"), "run `hf auth login`"),
        (ConnectionError("401 is the line\nmore"), "check the network"),
    ],
)
def test_an_upload_that_fails_is_one_sentence_and_the_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, advice: str
) -> None:
    def refuse(self: Any, **rest: Any) -> None:
        raise problem

    monkeypatch.setattr(hub.HfApi, "create_repo", refuse)
    with pytest.raises(OutputError, match=f"is converted.* 401 .*: {advice}, then") as caught:
        convert(str(write_t5(tmp_path / "t5")), tmp_path / "out", upload_repo="me/my-t5")
    assert "\n" not in str(caught.value) and (tmp_path / "out" / "model.safetensors").is_file()
