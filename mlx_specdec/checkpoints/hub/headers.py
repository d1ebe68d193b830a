"""A safetensors file of the Hub -> a file of its header and size, the rest of which is a hole.

Whether two tensors are copies of one another is in no header: of those that may be, a piece is
fetched as well.
"""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from ...errors import SourceError
from ..formats.safetensors import LONGEST_HEADER, read_header

GUESS = 100_000
"""Bytes in which most headers fit; a second request brings the rest of a longer one."""
PIECE = 1 << 16
_MAY_BE_COPIES = re.compile(r"(^|\.)(lm_head|shared|embed_tokens)\.")


def fetch_header(name: str, commit: str, listed: RepoSibling, file: Path) -> None:
    """Write `file`. listed: what the Hub's list says of it.

    Raises SourceError where the Hub sends no parts of files, CheckpointError for a damaged header,
    and what huggingface_hub raises.
    """
    url, size = hub.hf_hub_url(name, listed.rfilename, revision=commit), listed.size or 0
    begun = _part(url, 0, min(GUESS, size))
    end = 8 + int.from_bytes(begun[:8], "little")
    if len(begun) < end <= min(size, LONGEST_HEADER):
        begun += _part(url, len(begun), end - len(begun))
    with file.open("wb") as stream:
        stream.write(begun[:end])
        stream.truncate(size)
    place = end
    for tensor, info in read_header(file).items():
        if _MAY_BE_COPIES.search(tensor):
            middle = place + info.nbytes // 2
            piece = _part(url, middle, min(PIECE, place + info.nbytes - middle))
            with file.open("r+b") as stream:
                stream.seek(middle)
                stream.write(piece)
        place += info.nbytes


def _part(url: str, begin: int, count: int) -> bytes:
    """So many bytes of what is there, and no more."""
    if count <= 0:
        return b""
    headers = {**build_hf_headers(), "Range": f"bytes={begin}-{begin + count - 1}"}
    part = bytearray()
    timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as answer:
        hf_raise_for_status(answer)
        if begin and answer.status_code != 206:
            raise SourceError(
                "the Hub sends no parts of files: download the model, and inspect that"
            )
        for data in answer.iter_bytes():
            part += data
            if len(part) >= count:
                break
    return bytes(part[:count])
