"""Make models of real sizes, convert, inspect, load and run them: time, memory, and the same text.

    python scripts/measure_real_sizes.py --shapes llama-1.1b,llama-7b,t5-11b-12-layers

The weights are random, one block over and over, written without torch into a temporary directory
that is removed; it takes 1.4 times the largest source, 19 GB for the 7 B. Each step is a process of
its own and a line of JSON: wall and CPU seconds, the most resident memory, and of it the anonymous
part (Linux). Ends with 1 where a step fails, texts differ, or loading takes more than the result,
1.2 times the largest tensor in the type that it is computed in, and 300 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlx_specdec.checkpoints.formats.torch import OLD_MAGIC
from mlx_specdec.models import families

Shapes = dict[str, tuple[int, ...]]
OLD_PROTOCOL = 1001
"""The version of torch's format before 1.6."""
VOCABULARY = 32000
BLOCK = 1 << 23
"""Numbers that are drawn."""
SPREAD = 0.03
EXTRA = 300_000_000
PROMPT = "def fibonacci(n):"
TOKENS = 8
LOAD = """
import json, sys, time
from pathlib import Path
from mlx_specdec import process as blas
blas.load()
import mlx.core as mx
from mlx_specdec.checkpoints.files import Weights
from mlx_specdec.models.loading import load_model
started = time.perf_counter()
loaded = load_model(Path(sys.argv[1]), **json.loads(sys.argv[2]))
print(json.dumps({
    "dtype": loaded.dtype,
    "load_seconds": round(time.perf_counter() - started, 1),
    "result_bytes": loaded.model.nbytes,
    "active_bytes": mx.get_active_memory(),
    "peak_active_bytes": mx.get_peak_memory(),
    "largest_in_float32": max(
        4 * info.nbytes // (2 if info.dtype == "BF16" else 4)
        for info in Weights(Path(sys.argv[1])).infos.values()
    ),
}))
"""


def llama(width: int, inner: int, layers: int, heads: int, groups: int) -> dict[str, Any]:
    """config.json of a Llama."""
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-1.1b": llama(2048, 5632, 22, 32, 4),
    "llama-7b": llama(4096, 11008, 32, 32, 32),
    "t5-11b-12-layers": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 65536,
        "num_heads": 128,
        "num_layers": 6,
        "num_decoder_layers": 6,
        "relative_attention_num_buckets": 32,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}


def t5_shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of a T5."""
    network = families.of_config(config).network(config, None)
    return {name: array.shape for name, array in tree_flatten(network.parameters())}


def llama_shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of a Llama."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        **{f"self_attn.{name}_proj": (width, width) for name in "qo"},
        **{f"self_attn.{name}_proj": (keys, width) for name in "kv"},
        **{f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")},
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, width)}
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (width,), "lm_head.weight": (VOCABULARY, width)}


class Noise:
    """Random numbers, the same block at another place each time, and ones for norms."""

    def __init__(self, halves: bool) -> None:
        values = np.random.default_rng(0).normal(0, SPREAD, BLOCK).astype(np.float32)
        ones = np.ones(1 << 16, np.float32)
        kinds: list[Any] = [values, ones]
        if halves:  # bfloat16 is the upper half of a float32
            kinds = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in kinds]
        self.size = kinds[0].itemsize
        self._block, self._ones = (memoryview(each).cast("B") for each in kinds)
        self._at = 0

    def write(self, stream: Any, shape: tuple[int, ...]) -> None:
        """Write a tensor."""
        left = self.size * int(np.prod(shape))
        if len(shape) == 1:
            stream.write(self._ones[:left])
            return
        while left:
            piece = self._block[self._at : self._at + left]
            stream.write(piece)
            left -= len(piece)
            self._at = (self._at + len(piece)) % len(self._block)
        self._at = (self._at + self.size * 1_000_003) % len(self._block)


def write_safetensors(file: Path, shapes: Shapes) -> None:
    """bfloat16, as a Llama is published."""
    noise, header, at = Noise(halves=True), {}, 0
    for name, shape in shapes.items():
        end = at + noise.size * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    line = json.dumps(header).encode()
    line += b" " * (-len(line) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(line)) + line)
        for shape in shapes.values():
            noise.write(stream, shape)


def pickled_text(value: str) -> bytes:
    """A text as torch's pickles have it."""
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def pickled_tuple(values: tuple[int, ...]) -> bytes:
    """A tuple of whole numbers as torch's pickles have it."""
    return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"


def write_old_header(stream: Any, shapes: Shapes) -> None:
    """Write what precedes the tensors in a file of torch before 1.6, storages numbered from 0."""
    parts = [b"\x80\x02}("]
    for number, (name, shape) in enumerate(shapes.items()):
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        parts += [pickled_text(name), b"ctorch._utils\n_rebuild_tensor_v2\n(("]
        parts += [pickled_text("storage"), b"ctorch\nFloatStorage\n", pickled_text(str(number))]
        parts += [pickled_text("cpu"), b"J" + struct.pack("<i", int(np.prod(shape))), b"NtQK\x00"]
        parts += [pickled_tuple(shape), pickled_tuple(strides)]
        parts += [b"\x89ccollections\nOrderedDict\n)RtR"]
    stream.write(b"\x80\x02\x8a\x0a" + OLD_MAGIC.to_bytes(10, "little") + b".")
    stream.write(b"\x80\x02M" + struct.pack("<H", OLD_PROTOCOL) + b".\x80\x02}.")
    stream.write(b"".join([*parts, b"u."]))
    names = b"".join(pickled_text(str(number)) for number in range(len(shapes)))
    stream.write(b"\x80\x02](" + names + b"e.")


def write_old(file: Path, shapes: Shapes) -> None:
    """float32 as torch before 1.6 wrote it, as t5-11b is published."""
    noise = Noise(halves=False)
    with file.open("wb") as stream:
        write_old_header(stream, shapes)
        for shape in shapes.values():
            stream.write(struct.pack("<q", int(np.prod(shape))))
            noise.write(stream, shape)


def make(directory: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint with a tokenizer of bytes."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if config["model_type"] == "t5":
        write_old(directory / "pytorch_model.bin", t5_shapes(config))
    else:
        write_safetensors(directory / "model.safetensors", llama_shapes(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: id for id, word in enumerate(("<pad>", "</s>", *letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    os.sync()


def anonymous(status: Path) -> int:
    """RssAnon of a process in bytes; 0 where the system does not report it."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def run(step: str, words: list[str]) -> tuple[str, dict[str, Any]]:
    """What a process printed, and what it took; ends where it fails."""
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen([sys.executable, *words], stdout=printed)
        status = Path(f"/proc/{process.pid}/status")
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            peak = max(peak, anonymous(status))
            time.sleep(0.01)
        printed.seek(0)
        out = printed.read()
    _, code, usage = ended
    if code:
        sys.exit(f"{step} ended with {os.waitstatus_to_exitcode(code)}: {' '.join(words)}")
    unit = 1 if sys.platform == "darwin" else 1024
    return out, {
        "step": step,
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_resident_bytes": unit * usage.ru_maxrss,
        "peak_anonymous_bytes": peak,
    }


def measure(root: Path, name: str) -> list[dict[str, Any]]:
    """All steps of one shape; the source is removed before anything is run."""
    source, result = root / name, root / f"{name}-4-bit"
    began = time.perf_counter()
    make(source, CONFIGS[name])
    size = sum(file.stat().st_size for file in source.iterdir())
    seconds = round(time.perf_counter() - began, 1)
    lines = [{"shape": name, "step": "make", "seconds": seconds, "bytes": size}]
    print(json.dumps(lines[0]), flush=True)

    def show(took: dict[str, Any], **more: Any) -> None:
        lines.append({"shape": name, **took, **more})
        print(json.dumps(lines[-1]), flush=True)

    program = ["-m", "mlx_specdec"]
    show(run("inspect", [*program, "inspect", str(source), "--json"])[1])
    for options in ({"q_bits": 4}, {"dtype": "bfloat16"}):
        if options.get("dtype") and size > 4e9:
            continue  # the result alone is as large as the source
        out, took = run("load", ["-c", LOAD, str(source), json.dumps(options)])
        report = json.loads(out)
        limit = int(report["result_bytes"] + 1.2 * report["largest_in_float32"] + EXTRA)
        within = max(report["peak_active_bytes"], took["peak_anonymous_bytes"]) <= limit
        show(took, options=options, **report, limit_bytes=limit, within=within)
    words = ["convert", "--model", str(source), "--mlx-path", str(result), "-q", "--q-bits", "4"]
    show(run("convert", [*program, *words])[1])
    for file in source.iterdir():
        file.unlink()
    words = ["generate", "--model", str(result), "--json", "--no-cache", "--prompt", PROMPT]
    plain = [*program, *words, "--max-tokens", str(TOKENS), "--no-chat-template"]
    texts = []
    drafts = ["--draft-model", "self", "--draft-q-bits", "2", "--num-draft", "4"]
    for step, more in (("plain", ["--regular-decode"]), ("drafted", drafts)):
        out, took = run(step, [*plain, *more])
        report = json.loads(out)
        texts.append(report["text"])
        show(took, text=report["text"], same=texts[0] == texts[-1], dtype=report.get("dtype"))
    return lines


def main() -> int:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=",".join(CONFIGS))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    good = True
    for name in args.shapes.split(","):
        if name not in CONFIGS:
            sys.exit(f"no shape is called {name}: take some of {', '.join(CONFIGS)}")
        with tempfile.TemporaryDirectory(dir=args.directory) as root:
            lines = measure(Path(root), name)
        good &= all(line.get("within", True) and line.get("same", True) for line in lines)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
