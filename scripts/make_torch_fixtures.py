"""Write tests/fixtures/torch: small files as real torch writes them, and what they hold.

    python scripts/make_torch_fixtures.py tests/fixtures/torch tests/fixtures/t5

Needs torch and transformers (extra `train`); the tests that read the fixtures need neither.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

TYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
]
SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "int16": 2, "uint8": 1}


def every_kind() -> OrderedDict[str, torch.Tensor]:
    """Tensors of every type and every kind of view."""
    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in TYPES:
        found[name] = (torch.arange(6).reshape(2, 3) * 1.5).to(getattr(torch, name))
    base = torch.arange(24.0).reshape(4, 6)
    found["base"], found["tied"], found["tail"] = base, base, base.view(-1)[20:]
    found["window"], found["steps"], found["transposed"] = base[1:, 2:4], base[::2, ::3], base.t()
    found["repeated"] = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    found["scalar"], found["empty"] = torch.tensor(3.5), torch.zeros(0, 4)
    found["parameter"] = torch.nn.Parameter(torch.ones(2, 2))
    marked = torch.nn.Parameter(torch.full((3,), 7.0))
    marked.remark = "of its own"
    found["marked"] = marked
    found._metadata = OrderedDict({"": {"version": 1}})
    return found


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values; as integers of the same bits where numpy lacks the type."""
    plain = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return plain.view(torch.uint16).numpy()
    if tensor.dtype == torch.float8_e4m3fn:
        return plain.view(torch.uint8).numpy()
    return plain.numpy()


def write_big_endian(file: Path) -> None:
    """As a big-endian machine writes it: the same archive with every storage turned round."""
    values = {name: t for name, t in every_kind().items() if name in SIZES}
    torch.save(values, file)
    with zipfile.ZipFile(file) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    for number, name in enumerate(values):
        key = f"{file.stem}/data/{number}"
        data = np.frombuffer(records[key], f"<u{SIZES[name]}")
        records[key] = data.astype(f">u{SIZES[name]}").tobytes()
    records[f"{file.stem}/byteorder"] = b"big"
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    found = torch.load(file, weights_only=True)
    if not all(torch.equal(found[name], value) for name, value in values.items()):
        sys.exit("torch does not read the big-endian archive as meant")


def old_t5(source: Path, target: Path) -> None:
    """The older stream, with the copies and the stray bias that the first T5 uploads hold."""
    weights = OrderedDict(sorted(load_file(source / "model.safetensors").items()))
    for stack in ("encoder", "decoder"):
        weights[f"{stack}.embed_tokens.weight"] = weights["shared.weight"]
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    weights[bias] = torch.randn(32, 2, generator=torch.Generator().manual_seed(1))
    weights["lm_head.weight"] = weights["shared.weight"]
    target.mkdir(parents=True)
    torch.save(weights, target / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def sharded_t5(source: Path, target: Path) -> None:
    """Two zip archives and their index, as transformers 4 wrote them."""
    weights = load_file(source / "model.safetensors")
    names = sorted(weights)
    places = {}
    target.mkdir(parents=True)
    for number in (0, 1):
        file = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        part = {name: weights[name] for name in names[number::2]}
        torch.save(part, target / file)
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (target / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")


@torch.no_grad()
def llama(target: Path) -> None:
    """One Llama in both formats, and its log-probabilities."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, **sizes, **heads, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.mul_(4)
    model.save_pretrained(target)
    (target / "generation_config.json").unlink(missing_ok=True)
    torch.save(model.state_dict(), target / "pytorch_model.bin")
    tokens = torch.arange(12) * 5 % 64
    rows = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
    np.savez_compressed(target / "expected.npz", tokens=tokens.numpy(), log_p=rows.numpy())


def main(target: Path, t5: Path) -> None:
    """Write everything."""
    target.mkdir(parents=True, exist_ok=True)
    values = every_kind()
    torch.save(values, target / "every.zip.bin")
    torch.save(values, target / "every.old.bin", _use_new_zipfile_serialization=False)
    for protocol in (3, 4, 5):
        torch.save(values, target / f"every.zip{protocol}.bin", pickle_protocol=protocol)
    np.savez_compressed(
        target / "every.npz", **{name: as_numpy(each) for name, each in values.items()}
    )
    torch.save({"epoch": 3, "state_dict": values}, target / "nested.bin")
    write_big_endian(target / "big.bin")
    old_t5(t5 / "tied-scaled-relu", target / "old-t5")
    sharded_t5(t5 / "own-head-gated-gelu", target / "sharded-t5")
    llama(target / "llama")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/make_torch_fixtures.py DIRECTORY T5_FIXTURES")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
