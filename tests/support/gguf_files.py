"""GGUF files written byte by byte, sound ones and ones that no writer would write."""

import copy
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants

TYPES = {"float32": 0, "float16": 1, "int8": 24, "int32": 26, "float64": 28}
SMALL: Mapping[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "none",
}


@dataclass
class Raw:
    """A value with its type's number, to say it otherwise than `value` would."""

    kind: int
    data: bytes


@dataclass
class Gguf:
    """A file in the making.

    arrays: The data of the tensors. lists: Name -> (axes, type, offset) of a tensor whose entry
    differs from its data. packed: Name -> (axes, type) of a tensor whose array holds blocks.
    """

    architecture: str
    metadata: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    lists: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    packed: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def bytes(self) -> bytes:
        """The whole file."""
        keys = {"general.architecture": self.architecture, **self.metadata}
        body, listing = b"", b""
        for name, array in self.arrays.items():
            body += b"\0" * (-len(body) % self.alignment)
            plain = (array.shape[::-1], TYPES.get(str(array.dtype), 0))
            listed = (*self.packed.get(name, plain), len(body))
            axes, kind, offset = self.lists.get(name, listed)
            listing += self.text(name) + self.pack("I", len(axes))
            listing += b"".join(self.pack("Q", axis) for axis in axes)
            listing += self.pack("I", kind) + self.pack("Q", offset)
            body += array.tobytes()
        counts = len(self.arrays), len(keys)
        head = b"GGUF" + self.pack("I", self.version)
        head += b"".join(self.pack("Q", count) for count in counts)
        head += b"".join(self.text(key) + self.value(value) for key, value in keys.items())
        head += listing
        return head + b"\0" * (-len(head) % self.alignment) + body

    def quantize(self, name: str, kind: GGMLQuantizationType) -> None:
        """Store one matrix as blocks of a type."""
        array = self.arrays[name]
        self.packed[name] = array.shape[::-1], kind.value
        self.arrays[name] = quants.quantize(array.astype(np.float32), kind)

    def write(self, file: Path) -> Path:
        """The whole file, on disk."""
        file.write_bytes(self.bytes())
        return file

    def pack(self, form: str, number: Any) -> bytes:
        """One number."""
        return struct.pack(f"<{form}", number)

    def text(self, text: str) -> bytes:
        """One string."""
        return self.pack("Q", len(text.encode())) + text.encode()

    def value(self, value: Any) -> bytes:
        """A value of the metadata, its type before it."""
        if isinstance(value, Raw):
            return self.pack("I", value.kind) + value.data
        if isinstance(value, list):
            kind = 8 if isinstance(value[0], str) else 6 if isinstance(value[0], float) else 5
            parts = [self.value(entry)[4:] if kind == 8 else b"" for entry in value]
            if kind != 8:
                parts = [self.pack("f" if kind == 6 else "i", entry) for entry in value]
            return (
                self.pack("I", 9)
                + self.pack("I", kind)
                + self.pack("Q", len(value))
                + b"".join(parts)
            )
        if isinstance(value, str):
            return self.pack("I", 8) + self.text(value)
        if isinstance(value, bool):
            return self.pack("I", 7) + self.pack("B", value)
        if isinstance(value, float):
            return self.pack("I", 6) + self.pack("f", value)
        return self.pack("I", 4) + self.pack("I", value)


def llama(**changes: Any) -> Gguf:
    """A sound Llama of one layer in float16, its norms in float32."""
    random = np.random.default_rng(1)

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float16)

    layer = {
        "attn_norm": np.ones(32, np.float32),
        "attn_q": matrix(32, 32),
        "attn_k": matrix(16, 32),
        "attn_v": matrix(16, 32),
        "attn_output": matrix(32, 32),
        "ffn_norm": np.ones(32, np.float32),
        "ffn_gate": matrix(48, 32),
        "ffn_up": matrix(48, 32),
        "ffn_down": matrix(32, 48),
    }
    arrays = {f"blk.0.{name}.weight": array for name, array in layer.items()}
    arrays["token_embd.weight"], arrays["output.weight"] = matrix(40, 32), matrix(40, 32)
    arrays["output_norm.weight"] = np.ones(32, np.float32)
    return Gguf("llama", {**SMALL, **changes}, arrays)


def halves(model: Gguf) -> tuple[Gguf, Gguf]:
    """Divide a model into two parts. Only the first part has metadata."""
    first, second = copy.deepcopy(model), Gguf(model.architecture)
    for name in list(model.arrays)[::2]:
        second.arrays[name] = first.arrays.pop(name)
    return first, second
