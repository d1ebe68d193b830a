"""Compare the weights of a quantized GGUF file with those that llama.cpp's decoder in NumPy gives:

    python benchmarks/k_types.py gemma-3-270m.Q4_K_M.gguf prompts/chat.jsonl

Prints one line of JSON. `weights` has, for each type of matrix, the largest difference of a weight
and the root mean square of all differences relative to that of the weights. `perplexity` and
`same_first` are of the first 400 positions of the text. Both models compute in float32. The
reference has the decoder's weights, and the other model has those of this package. `megabytes` has
the sizes of the file and of the quantized network, and the memory that loading the network takes.
That memory is anonymous: pages of the file that the system maps do not count. Scales are float16,
as on a GPU.

The decoder and the names of the tensors come from the package gguf. Files of Llamas cannot be
compared, because llama.cpp stores the rows of queries and keys in another order. The program needs
memory for both versions of the weights in float32: 16 GB for a model of 1.5 billion weights."""

import argparse
import json
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec import load, system

if __name__ == "__main__":
    system.load_blas()

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from gguf.tensor_mapping import get_tensor_name_map
from mlx.utils import tree_flatten, tree_unflatten

from mlx_specdec.checkpoints.source import as_directory
from mlx_specdec.checkpoints.stored_models import ROOT
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.number_format import nbytes

POSITIONS = 400
CHUNK_ROWS = 1 << 14
"""Rows of a matrix that are compared at a time."""
SMALL = ROOT / "weights" / "py-llama-draft"
"""A model that is loaded first, so that imported modules do not count as memory."""
SECONDS_BETWEEN_SAMPLES = 0.003


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@contextmanager
def sampled_memory() -> Iterator[list[int]]:
    """Yield a list with the anonymous memory before the block, and the largest one in the block."""
    found, done = [anonymous_bytes()] * 2, threading.Event()

    def sample() -> None:
        while not done.wait(SECONDS_BETWEEN_SAMPLES):
            found[1] = max(found[1], anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def memory_of(path: Path) -> dict[str, float]:
    """Load the quantized network. Return the sizes that the JSON line reports, in megabytes."""
    load_model(SMALL)
    mx.clear_cache()
    mx.reset_peak_memory()
    with as_directory(path) as directory, sampled_memory() as memory:
        network = load_model(directory, dtype="float16", expand=False).model.network
    matrices = [module for module in network.modules() if "weight" in module]
    sizes = {
        "file": path.stat().st_size,
        "network": nbytes(network),
        "largest_matrix": max(map(nbytes, matrices)),
        "peak_of_mlx": mx.get_peak_memory(),
        "peak_of_process": memory[1] - memory[0],
    }
    return {name: round(size / 1e6, 1) for name, size in sizes.items()}


def quantized_matrices(path: Path, network: nn.Module) -> Iterator[tuple[str, ReaderTensor]]:
    """Yield each quantized matrix of the file, with its name in the network."""
    reader = GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    layers = reader.fields[f"{architecture}.block_count"].contents()
    [number] = [key for key, name in MODEL_ARCH_NAMES.items() if name == architecture]
    names = get_tensor_name_map(number, layers)
    for name, _ in tree_flatten(network.parameters()):
        tensor = stored[names.get_name(name, (".weight", ".bias"))]
        if len(tensor.shape) > 1 and tensor.data.dtype == np.uint8:
            yield name, tensor


def replace_weights(network: nn.Module, path: Path) -> dict[str, dict[str, float]]:
    """Give an expanded network the decoder's weights. Return the differences from the network's own
    weights by type."""
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for name, tensor in quantized_matrices(path, network):
        own, rows = dict(tree_flatten(network.parameters()))[name], []
        for begin in range(0, len(own), CHUNK_ROWS):
            values = dequantize(tensor.data[begin : begin + CHUNK_ROWS], tensor.tensor_type)
            change = np.array(own[begin : begin + CHUNK_ROWS]) - values
            squares = (float(np.square(part, dtype=np.float64).sum()) for part in (change, values))
            largest = float(np.abs(change).max())
            found.setdefault(tensor.tensor_type.name, []).append((values.size, largest, *squares))
            rows.append(mx.array(values))
        reference = mx.concatenate(rows)
        mx.eval(reference)
        network.update(tree_unflatten([(name, reference)]))
        del own, rows, reference
        mx.clear_cache()
    figures = {}
    for kind, chunks in found.items():
        counts, largest_ones, changes, wholes = zip(*chunks, strict=True)
        rms = math.sqrt(sum(changes) / sum(wholes))
        figures[kind] = {"count": sum(counts), "largest": max(largest_ones), "relative_rms": rms}
    return figures


def scores(network: Any, ids: list[int]) -> tuple[float, mx.array]:
    """Return the perplexity of all tokens but the first, and the greedy choice for each of them."""
    logits = network(mx.array([ids[:-1]]))[0].astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, mx.array(ids[1:]))
    choices = mx.argmax(logits, axis=-1)
    mx.eval(choices)
    return math.exp(losses.mean().item()), choices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    given = parser.parse_args()
    figures: dict[str, Any] = {"file": given.model.name, "megabytes": memory_of(given.model)}
    mx.clear_cache()
    pair = load(given.model, dtype="float32", expand_weights=True)
    network, text = pair.target.network, given.text.read_text(encoding="utf-8")
    ids = pair.tokenizer.encode(text)[: POSITIONS + 1]
    own, own_choices = scores(network, ids)
    figures["weights"] = replace_weights(network, given.model)
    reference, choices = scores(network, ids)
    figures["perplexity"] = {"reference": reference, "own": own, "change": own / reference - 1}
    figures["same_first"] = [mx.sum(own_choices == choices).item(), choices.size]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
