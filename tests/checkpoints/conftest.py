"""A Hub on loopback for downloads, through the real huggingface_hub."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from ..support.hub_server import Hub, serve


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a model without files. huggingface_hub asks it, keeps files aside and does not
    pause."""
    held = Hub()
    for name in [name for name in os.environ if name.startswith("HF_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    with serve(held) as address:
        for setting, value in {
            "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens"),
            "HF_HUB_OFFLINE": False,
            "DOWNLOAD_CHUNK_SIZE": 1000,
        }.items():
            monkeypatch.setattr(constants, setting, value)
        hasty = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        for module in (file_download, _http):
            monkeypatch.setattr(module, "time", hasty)
        huggingface_hub.close_session()
        yield held
        huggingface_hub.close_session()
