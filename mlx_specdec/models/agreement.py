"""Which models were seen to agree on rows, as empty files in the platform's cache directory.

`row_check` compares passes, which a start pays for; what depends on code and configuration alone
need not be found out twice. A model that disagrees is compared, and told of, every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import __version__
from .. import process as user_cache
from .cache_settings import CacheSettings

if TYPE_CHECKING:
    pass


def identity(
    config: Mapping[str, Any],
    dtype: str,
    caches: CacheSettings | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> str:
    """What the passes of a model depend on beside its weights, as a digest. config, adapter: the
    contents of config.json and adapter_config.json. dtype: in words, as loaded."""
    versions = __version__, version("mlx"), version("mlx-lm"), str(mx.default_device())
    parts = json.dumps([config, dtype, repr(caches), adapter, *versions], sort_keys=True)
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def once(identity: str | None, agree: Callable[[], bool]) -> bool:
    """`agree()`, unless a model of this identity is known to agree; None is always asked."""
    file = None if identity is None else user_cache.directory("rows") / identity
    if file is not None and file.exists():
        return True
    agreed = agree()
    if agreed and file is not None:
        with contextlib.suppress(OSError):  # a cache is a help and never a duty
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    return agreed
