"""MLX wants to be told that a thread ends: what it keeps for the thread is cleared too late else.

Without `mx.clear_streams`, a process in which a thread has generated may abort when it ends
(https://github.com/ml-explore/mlx/pull/4373); the main thread MLX looks after by itself.
"""

from __future__ import annotations

import threading

import mlx.core as mx


class _End:
    """Let go by a thread's own storage, which Python empties in the thread as the last thing."""

    def __del__(self) -> None:
        mx.clear_streams()


_storage = threading.local()


def clear_at_end() -> None:
    """Clear what MLX keeps for this thread when the thread ends; once is enough."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not hasattr(_storage, "end"):
        _storage.end = _End()
