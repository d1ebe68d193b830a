"""GGUF files written byte by byte, sound ones and ones that no writer would write."""

import copy
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""K type -> the positions in a block of the float16 scale and minimum."""
SIZES = {"Q2_K": 3e-3, "Q3_K": 8e-4, "Q4_K": 3e-4, "Q5_K": 1.5e-4, "Q6_K": 3e-5}
"""K type -> the largest scale of a block with usual weights, before it is multiplied."""
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

    def fill(self, name: str, kind: GGMLQuantizationType) -> None:
        """Store one matrix as random blocks of a type, with values of a usual size around 0."""
        array, (size, nbytes) = self.arrays[name], GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(len(self.packed))
        if kind.name not in SCALES:
            self.arrays[name] = random.normal(0, 0.05, array.shape).astype(np.float32)
            self.quantize(name, kind)
            return
        blocks = random.integers(0, 256, (array.size // size, nbytes), np.uint8)
        # Neighboring groups have scales of a similar size, which may have different signs.
        if kind.name == "Q2_K":
            factors = blocks[:, :16] & 7 | 8
            near = factors + random.integers(-1, 2, factors.shape)
            blocks[:, :16] = factors | near.clip(0, 15).astype(np.uint8) << 4
        if kind.name == "Q3_K":
            blocks[:, 104:108] = (blocks[:, 104:108] & 0x55) * 3
        if kind.name == "Q6_K":
            factors = blocks[:, 192:208]
            factors[:] = np.where(factors < 128, factors | 64, factors & 191)
        scale, *minimum = SCALES[kind.name]
        values = random.uniform(0.5, 1, (len(blocks), 1)) * SIZES[kind.name]
        blocks[:, scale : scale + 2] = values.astype(np.float16).view(np.uint8)
        for place in minimum:
            values = values * ((1 << int(kind.name[1])) - 1) / 2
            blocks[:, place : place + 2] = values.astype(np.float16).view(np.uint8)
        self.packed[name] = array.shape[::-1], kind.value
        self.arrays[name] = blocks.reshape(*array.shape[:-1], -1)

    def values(self) -> "Gguf":
        """Return the same model in float32, dequantized by the gguf package."""
        model = copy.deepcopy(self)
        for name, (_, kind) in self.packed.items():
            array = quants.dequantize(self.arrays[name], GGMLQuantizationType(kind))
            model.arrays[name] = array.astype(np.float32)
        model.packed.clear()
        return model

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


def wide(kinds: Sequence[GGMLQuantizationType], vocabulary: int = 40) -> Gguf:
    """A Llama with rows of 256 weights. Its matrices have the types in turn."""
    model, sizes = llama(), {32: 256, 16: 128, 48: 512, 40: vocabulary}
    model.metadata |= {"llama.embedding_length": 256, "llama.feed_forward_length": 512}
    for name, array in model.arrays.items():
        model.arrays[name] = np.ones([sizes[extent] for extent in array.shape], np.float32)
    matrices = [name for name, array in model.arrays.items() if array.ndim > 1]
    for number, name in enumerate(matrices):
        model.fill(name, kinds[number % len(kinds)])
    return model


def halves(model: Gguf) -> tuple[Gguf, Gguf]:
    """Divide a model into two parts. Only the first part has metadata."""
    first, second = copy.deepcopy(model), Gguf(model.architecture)
    for name in list(model.arrays)[::2]:
        second.arrays[name] = first.arrays.pop(name)
    return first, second
