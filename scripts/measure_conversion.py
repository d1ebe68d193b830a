"""Convert a synthetic T5 of many gigabytes: peak memory and time, against a plain copy.

    python scripts/measure_conversion.py --gigabytes 6 --formats zip,old,safetensors

Writes the checkpoint itself, without torch, into a temporary directory that it removes; three times
the size has to be free. Memory is RssAnon (Linux): what the process holds besides mapped files.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlx_specdec.checkpoints.disk.sizes import default_shard_bytes, parse, show
from mlx_specdec.checkpoints.formats.torch.file import OLD_MAGIC, OLD_PROTOCOL
from mlx_specdec.checkpoints.keys import t5_shapes

BLOCK = 1 << 24
SAMPLED_EVERY = 0.01
EXTRA = 300_000_000


def configuration(nbytes: float) -> dict[str, Any]:
    """A T5 of about this many bytes in float32, t5-11b's shape with fewer layers."""
    config: dict[str, Any] = {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 16384,
        "num_heads": 32,
        "num_layers": 1,
        "relative_attention_num_buckets": 32,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    while total(config) < nbytes:
        config["num_layers"] += 1
    return config


def total(config: Mapping[str, Any]) -> int:
    """Bytes of the tensors in float32."""
    shapes = t5_shapes(config, own_head=False).values()
    return sum(4 * int(np.prod(shape)) for shape in shapes)


class Noise:
    """Random float32 values; the same block over and over, at another place each time."""

    def __init__(self) -> None:
        values = np.random.default_rng(0).normal(0, 0.05, 2 * BLOCK // 4)
        self._bytes = memoryview(values.astype(np.float32)).cast("B")
        self._at = 0

    def write(self, stream: Any, nbytes: int) -> None:
        """Write so many bytes."""
        while nbytes:
            size = min(nbytes, BLOCK)
            stream.write(self._bytes[self._at : self._at + size])
            nbytes -= size
            self._at = (self._at + 4 * 1021) % BLOCK


def text(value: str) -> bytes:
    """A pickled text."""
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def numbers(values: tuple[int, ...]) -> bytes:
    """A pickled tuple."""
    return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"


def state_dict(shapes: Mapping[str, tuple[int, ...]], *, old: bool) -> bytes:
    """The pickle that torch.save would write, storages numbered from 0."""
    parts = [b"\x80\x02}("]
    for number, (name, shape) in enumerate(shapes.items()):
        count = int(np.prod(shape))
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        parts += [text(name), b"ctorch._utils\n_rebuild_tensor_v2\n(("]
        parts += [text("storage"), b"ctorch\nFloatStorage\n", text(str(number)), text("cpu")]
        parts += [b"J" + struct.pack("<i", count), b"N" if old else b"", b"tQK\x00"]
        parts += [numbers(shape), numbers(strides), b"\x89ccollections\nOrderedDict\n)RtR"]
    return b"".join([*parts, b"u."])


def write_zip(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """pytorch_model.bin as torch >= 1.6 writes it."""
    noise = Noise()
    with zipfile.ZipFile(directory / "pytorch_model.bin", "w") as archive:
        archive.writestr("pytorch_model/data.pkl", state_dict(shapes, old=False))
        for number, shape in enumerate(shapes.values()):
            with archive.open(f"pytorch_model/data/{number}", "w", force_zip64=True) as stream:
                noise.write(stream, 4 * int(np.prod(shape)))


def write_old_header(stream: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write what precedes the tensors in a file of torch before 1.6."""
    stream.write(b"\x80\x02\x8a\x0a" + OLD_MAGIC.to_bytes(10, "little") + b".")
    stream.write(b"\x80\x02M" + struct.pack("<H", OLD_PROTOCOL) + b".\x80\x02}.")
    stream.write(state_dict(shapes, old=True))
    stream.write(b"\x80\x02](" + b"".join(text(str(i)) for i in range(len(shapes))) + b"e.")


def write_old(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """pytorch_model.bin as torch < 1.6 writes it."""
    noise = Noise()
    with (directory / "pytorch_model.bin").open("wb") as stream:
        write_old_header(stream, shapes)
        for shape in shapes.values():
            stream.write(struct.pack("<q", int(np.prod(shape))))
            noise.write(stream, 4 * int(np.prod(shape)))


def write_safetensors(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """model.safetensors."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    line = json.dumps(header).encode()
    line += b" " * (-len(line) % 8)
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(line)) + line)
        Noise().write(stream, at)


WRITERS = {"zip": write_zip, "old": write_old, "safetensors": write_safetensors}


def make(root: Path, kind: str, config: Mapping[str, Any]) -> Path:
    """A checkpoint of one format."""
    source = root / kind
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    WRITERS[kind](source, t5_shapes(config, own_head=False))
    os.sync()
    return source


def command(source: Path, target: Path, options: list[str]) -> list[str]:
    """The conversion as users start it."""
    program = "from mlx_specdec.cli.app import convert, run_one; run_one(convert)"
    named = ["--model", str(source), "--mlx-path", str(target)]
    return [sys.executable, "-c", program, *named, *options]


def convert(source: Path, target: Path, options: list[str], said: BinaryIO) -> tuple[float, int]:
    """Seconds, and the most bytes of anonymous memory; 0 where the system does not tell."""
    begin, peak = time.perf_counter(), 0
    process = subprocess.Popen(command(source, target, options), stderr=said)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        peak = max(peak, anonymous(status))
        time.sleep(SAMPLED_EVERY)
    if process.returncode:
        sys.exit(f"the conversion ended with {process.returncode}")
    return time.perf_counter() - begin, peak


def anonymous(status: Path) -> int:
    """RssAnon in bytes."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def copy(source: Path, target: Path) -> float:
    """Seconds of a copy of all files, written through to the disk as a conversion's are."""
    begin = time.perf_counter()
    target.mkdir()
    for file in source.iterdir():
        with file.open("rb") as wanted, (target / file.name).open("wb") as stream:
            shutil.copyfileobj(wanted, stream, BLOCK)
            os.fsync(stream.fileno())
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def measure(root: Path, kind: str, config: Mapping[str, Any], options: list[str]) -> dict[str, Any]:
    """One format: a copy, a conversion, a copy."""
    source = make(root, kind, config)
    first = copy(source, root / "copy")
    seconds, peak = convert(source, root / "out", options, sys.stderr.buffer)
    written = sum(file.stat().st_size for file in (root / "out").iterdir())
    shutil.rmtree(root / "out")
    second = copy(source, root / "copy")
    shutil.rmtree(source)
    return {
        "format": kind,
        "bytes_read": total(config),
        "bytes_written": written,
        "seconds": round(seconds, 1),
        "copy_seconds": [round(first, 1), round(second, 1)],
        "times_copy": round(2 * seconds / (first + second), 2),
        "peak_anonymous_bytes": peak,
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--formats", default=",".join(WRITERS))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--max-shard-size", default=str(default_shard_bytes()))
    parser.add_argument("--dtype")
    asked = parser.parse_args()
    config = configuration(asked.gigabytes * 1e9)
    if shutil.disk_usage(asked.directory).free < 3.2 * total(config):
        sys.exit(f"{asked.directory} has less than {show(int(3.2 * total(config)))} free")
    options = ["--max-shard-size", asked.max_shard_size]
    options += ["--dtype", asked.dtype] if asked.dtype else []
    results: list[dict[str, Any]] = []
    for kind in asked.formats.split(","):
        with tempfile.TemporaryDirectory(dir=asked.directory) as name:
            results.append(measure(Path(name), kind, config, options))
            print(json.dumps(results[-1]), flush=True)
    limit = int(1.2 * parse(asked.max_shard_size)) + EXTRA
    print(json.dumps({"anonymous_limit_bytes": limit, "results": results}))


if __name__ == "__main__":
    main()
