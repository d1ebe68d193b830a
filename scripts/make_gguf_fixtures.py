"""Write tests/fixtures/gguf: tiny random models as GGUF, and what torch computes with them.

    python scripts/make_gguf_fixtures.py tests/fixtures/gguf

The files are laid out as llama.cpp's converter does it and written by the gguf package. The
expected log-probabilities come from transformers' own models on torch, whose weights are what the
file's bytes mean: packed types are expanded by transformers' torch code, not by the gguf package.
Where transformers reads such a GGUF file itself, its logits from the file have to be the same.

Needs torch, transformers (extra `train`), gguf, sentencepiece and protobuf; the
tests need no torch.
"""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf import dequant

TEXT = (
    "The quick brown fox jumps over the lazy dog. Grüße aus Köln, 1234567 Mal! "
    "L'été, c'est bientôt fini;  deux  espaces. I'll say it's 3.14, they've said 42. "
    "fox dogs foxes jumping jumped lazily quickly brownish\n\n\tdef f(x): return x ** 2\n"
)
ASKED = [
    "The quick brown fox",
    " two  spaces and 12345 numbers",
    "Köln’s été: I'll see – 日本 🙂!",
    "line\n\n  def f(x):\n\treturn x",
    "",
]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS: Mapping[Kind, tuple[int, ...]] = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ1_S: (0,),
    Kind.IQ4_XS: (0,),
    Kind.IQ4_NL: (0,),
}
"""Where a block's float16 scales lie, of types that the gguf package reads but cannot write."""


class Writer:
    """A GGUF file in the making, which remembers what its bytes mean."""

    def __init__(self, file: Path, architecture: str, kinds: Iterable[Kind]) -> None:
        self.file = gguf.GGUFWriter(str(file), architecture)
        self.kinds = list(kinds)
        self.random = np.random.default_rng(5)
        self.matrices = 0

    def tensor(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Store a tensor; gives the values that it has in the file."""
        plain = values.detach().float().numpy()
        kind = Kind.F32
        if plain.ndim > 1 and "ffn_gate_inp" not in name:
            kind = self.kinds[self.matrices % len(self.kinds)]
            self.matrices += 1
            if plain.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = Kind.F32
        if kind in BLOCKS:
            stored = self._random_blocks(kind, plain.shape)
        elif kind in (Kind.F32, Kind.F16, Kind.F64):
            types = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.F64: np.float64}
            stored = plain.astype(types[kind])
        else:
            stored = gguf.quants.quantize(plain, kind)
        self.file.add_tensor(name, stored, raw_dtype=kind)
        return _meaning(stored, kind).reshape(values.shape)

    def close(self) -> None:
        """Write all of it."""
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()

    def _random_blocks(self, kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
        count, nbytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = self.random.integers(0, 256, (int(np.prod(shape)) // count, nbytes), np.uint8)
        for scale in (1.0, None):
            if scale is None:
                scale = 0.08 / float(_meaning(blocks, kind).std())
            half = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
            for place in BLOCKS[kind]:
                blocks[:, place : place + 2] = half
        return blocks.reshape(*shape[:-1], -1)


def _meaning(stored: np.ndarray, kind: Kind) -> torch.Tensor:
    if kind in (Kind.F32, Kind.F16, Kind.F64):
        return torch.from_numpy(stored.astype(np.float32))
    raw = torch.from_numpy(np.ascontiguousarray(stored))
    if kind == Kind.BF16:
        return raw.view(torch.bfloat16).float()
    if kind.value in dequant.GGML_BLOCK:
        return dequant.dequantize(raw.reshape(-1, raw.shape[-1]), kind.value)
    return torch.from_numpy(gguf.quants.dequantize(stored, kind))


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of rotary heads as llama.cpp's converter orders them."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def restored(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `permuted`."""
    shape = (heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def name_of(architecture: str, key: str) -> str:
    """llama.cpp's name of a tensor."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    name = gguf.get_tensor_name_map(numbers[architecture], 2).get_name(key, (".weight", ".bias"))
    return name or sys.exit(f"{architecture} has no {key}")


@torch.no_grad()
def livelier(model: torch.nn.Module, factor: float) -> None:
    """Random weights under which tokens differ clearly and every vector matters; no dropout."""
    model.eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.copy_(1 + torch.rand(weight.shape) if "bias" not in name else weight + 0.3)
            # As of a half-precision original: exact in both half types.
            weight.copy_(weight.half().bfloat16().float())
        else:
            weight.mul_(factor)


@torch.no_grad()
def decoder(
    root: Path,
    name: str,
    model: Any,
    kinds: Iterable[Kind],
    *,
    architecture: str = "llama",
    vocabulary: Any = None,
    twin: bool = True,
    joined: bool = True,
) -> None:
    """One decoder-only model. twin: transformers reads such a file itself. joined: experts lie in
    one tensor, as they do since 2024."""
    config = model.config
    livelier(model, 4)
    writer = Writer(root / f"{name}.gguf", architecture, kinds)
    describe(writer.file, config)
    (vocabulary or no_vocabulary)(writer.file)
    state = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".mlp.experts." in key:
            state[key] = experts(writer, key, weight, joined)
            continue
        heads = 0
        if architecture == "llama" and (".q_proj." in key or ".k_proj." in key):
            heads = config.num_attention_heads if ".q_" in key else config.num_key_value_heads
        stored = permuted(weight, heads) if heads else weight
        meant = writer.tensor(name_of(architecture, key), stored)
        state[key] = restored(meant, heads) if heads else meant
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type") == "llama3":
        width = config.hidden_size // config.num_attention_heads
        plain = scaling["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        writer.tensor("rope_freqs.weight", plain / model.model.rotary_emb.inv_freq)
    writer.close()
    model.load_state_dict(state, strict=False)
    tokens = torch.arange(12) * 5 % config.vocab_size
    rows = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
    if twin:
        other = type(model).from_pretrained(root, gguf_file=f"{name}.gguf", dtype=torch.float32)
        found = other(input_ids=tokens[None]).logits[0].log_softmax(-1)
        check_twin(name, found, rows)
    np.savez_compressed(root / f"{name}.npz", tokens=tokens.numpy(), log_p=rows.numpy())


def check_twin(name: str, found: torch.Tensor, rows: torch.Tensor) -> None:
    """Whether transformers finds in the file what was meant."""
    print(f"{name}: transformers reads the file itself {(found - rows).abs().max():.2g} off")
    if (found - rows).abs().max() > 1e-3:
        sys.exit(f"{name} is not what transformers takes it for")


def experts(writer: Writer, key: str, weight: torch.Tensor, joined: bool) -> torch.Tensor:
    """All experts of one layer; transformers joins gate and up."""
    number = key.split(".")[2]
    parts = {"down": weight}
    if "gate_up" in key:
        parts = dict(zip(("gate", "up"), weight.chunk(2, dim=1), strict=True))
    meant = []
    for part, each in parts.items():
        if joined:
            meant.append(writer.tensor(f"blk.{number}.ffn_{part}_exps.weight", each))
        else:
            single = [
                writer.tensor(f"blk.{number}.ffn_{part}.{expert}.weight", one)
                for expert, one in enumerate(each)
            ]
            meant.append(torch.stack(single))
    return torch.cat(meant, dim=1)


def describe(file: gguf.GGUFWriter, config: Any) -> None:
    """Metadata of a decoder-only model, as llama.cpp's converter writes them."""
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    file.add_rope_dimension_count(width)
    if width != config.hidden_size // config.num_attention_heads:
        file.add_key_length(width)
        file.add_value_length(width)
    rope = config.rope_parameters
    file.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        file.add_rope_scaling_factor(rope["factor"])
    if getattr(config, "num_local_experts", 0):
        file.add_expert_count(config.num_local_experts)
        file.add_expert_used_count(config.num_experts_per_tok)


@torch.no_grad()
def t5(root: Path, name: str, model: Any, kinds: Iterable[Kind], vocabulary: Any = None) -> None:
    """One encoder-decoder model."""
    config = model.config
    livelier(model, 1.5)
    writer = Writer(root / f"{name}.gguf", "t5", kinds)
    file = writer.file
    file.add_context_length(512)
    file.add_embedding_length(config.d_model)
    file.add_feed_forward_length(config.d_ff)
    file.add_block_count(config.num_layers)
    if config.num_decoder_layers != config.num_layers:
        file.add_decoder_block_count(config.num_decoder_layers)
    file.add_head_count(config.num_heads)
    file.add_key_length(config.d_kv)
    file.add_value_length(config.d_kv)
    file.add_layer_norm_eps(config.layer_norm_epsilon)
    file.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    file.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    file.add_decoder_start_token_id(config.decoder_start_token_id)
    (vocabulary or no_vocabulary)(file)
    state = {}
    for key, weight in model.state_dict().items():
        tied = key == "lm_head.weight" and name != "t5-copied-head" and config.tie_word_embeddings
        if tied or "embed_tokens" in key:
            continue
        state[key] = writer.tensor(name_of("t5", key), weight)
    writer.close()
    if name == "t5-copied-head":
        state["lm_head.weight"] = state["shared.weight"]
    for stack in ("encoder", "decoder"):
        state[f"{stack}.embed_tokens.weight"] = state["shared.weight"]
    model.load_state_dict(state, strict=False)
    source, tokens = torch.arange(2, 14), torch.arange(11) * 5 % config.vocab_size
    fed = torch.cat([torch.tensor([config.decoder_start_token_id]), tokens])
    rows = model(input_ids=source[None], decoder_input_ids=fed[None]).logits[0].log_softmax(-1)
    if name != "t5-copied-head":
        # Told which T5 it is: it does not find sizes and kind in the file. Only where it ties does
        # it share the embedding between the stacks; a head that differs stays itself.
        told = copy.deepcopy(config)
        told.tie_word_embeddings = True
        with torch.random.fork_rng():
            other = type(model).from_pretrained(
                root, gguf_file=f"{name}.gguf", config=told, dtype=torch.float32
            )
        other.config.tie_word_embeddings = config.tie_word_embeddings
        other.config.scale_decoder_outputs = config.scale_decoder_outputs
        found = other(input_ids=source[None], decoder_input_ids=fed[None]).logits[0]
        check_twin(name, found.log_softmax(-1), rows)
    np.savez_compressed(
        root / f"{name}.npz", source=source.numpy(), tokens=fed.numpy(), log_p=rows.numpy()
    )


def no_vocabulary(file: gguf.GGUFWriter) -> None:
    """What llama.cpp writes where there is none."""
    file.add_tokenizer_model("none")


def sentencepiece_model(kind: str) -> sentencepiece.SentencePieceProcessor:
    """A small vocabulary of one text."""
    bytes_written = io.BytesIO()
    t5ish = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    bpe = {"byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True}
    bpe |= {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 3),
        model_writer=bytes_written,
        model_type=kind,
        vocab_size=420 if kind == "bpe" else 90,
        hard_vocab_limit=False,
        minloglevel=2,
        **(bpe if kind == "bpe" else t5ish),
    )
    return sentencepiece.SentencePieceProcessor(model_proto=bytes_written.getvalue())


def sentencepiece_vocabulary(
    file: gguf.GGUFWriter, kind: str, processor: sentencepiece.SentencePieceProcessor, size: int
) -> None:
    """As llama.cpp's converter writes one, filled up to `size`."""
    tokens, scores, types = [], [], []
    for id in range(processor.get_piece_size()):
        tokens.append(processor.id_to_piece(id))
        scores.append(processor.get_score(id))
        types.append(1)
        for number, test in ((2, "is_unknown"), (3, "is_control"), (5, "is_unused")):
            types[-1] = number if getattr(processor, test)(id) else types[-1]
        types[-1] = 6 if processor.is_byte(id) else types[-1]
    for id in range(len(tokens), size):
        tokens.append(f"[PAD{id}]")
        scores.append(-10000.0)
        types.append(5)
    file.add_tokenizer_model(kind)
    file.add_tokenizer_pre("default")
    file.add_token_list(tokens)
    file.add_token_scores(scores)
    file.add_token_types(types)
    model = ModelProto()
    model.ParseFromString(processor.serialized_model_proto())
    if model.normalizer_spec.precompiled_charsmap:
        file.add_precompiled_charsmap(model.normalizer_spec.precompiled_charsmap)
    file.add_remove_extra_whitespaces(model.normalizer_spec.remove_extra_whitespaces)
    file.add_add_space_prefix(model.normalizer_spec.add_dummy_prefix)
    for name in ("bos", "eos", "unk", "pad"):
        id = getattr(processor, f"{name}_id")()
        if id >= 0:
            getattr(file, f"add_{name}_token_id")(id)


def byte_vocabulary(rule: str) -> Tokenizer:
    """A byte-level BPE vocabulary of one text, split as Llama 3 or GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == "default")
    splits = [pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits * (rule != "default"), last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.split("\n") * 3, trainer)
    return tokenizer


def write_byte_vocabulary(file: gguf.GGUFWriter, rule: str, tokenizer: Tokenizer) -> None:
    """As llama.cpp's converter writes one."""
    size = tokenizer.get_vocab_size()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(rule)
    file.add_token_list([tokenizer.id_to_token(id) for id in range(size)])
    file.add_token_types([3 if id < 2 else 1 for id in range(size)])
    file.add_token_merges([" ".join(pair) for pair in merges])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_add_bos_token(rule != "default")
    file.add_chat_template("{% for m in messages %}[{{ m.content }}]{% endfor %}")


def llama_config(**changes: Any) -> transformers.LlamaConfig:
    """A small one with grouped heads and its own output head."""
    return transformers.LlamaConfig(**{**SMALL, **HEADS, "tie_word_embeddings": False} | changes)


def t5_config(**changes: Any) -> dict[str, Any]:
    """Sizes whose rows divide into blocks of 32."""
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    return {**sizes, "num_layers": 2, "decoder_start_token_id": 0, **changes}


def texts(root: Path) -> Iterator[tuple[str, Any]]:
    """Vocabularies by the fixture that has them; what they make of texts goes into a file."""
    expected: dict[str, Any] = {}
    bpe, unigram = sentencepiece_model("bpe"), sentencepiece_model("unigram")
    for name, processor, around in (
        ("llama-f16", bpe, ([1], [])),
        ("t5-q8_0", unigram, ([], [1])),
    ):
        kind = name.split("-")[0]
        size = processor.get_piece_size() if kind == "llama" else 96
        pairs = [[text, [*around[0], *processor.encode(text), *around[1]]] for text in ASKED]
        expected[name] = {"pairs": pairs, "size": processor.get_piece_size()}
        yield (
            name,
            lambda file, k=kind, p=processor, s=size: sentencepiece_vocabulary(file, k, p, s),
        )
    for name, rule, begins in (
        ("llama-three", "llama-bpe", [0]),
        ("qwen2-q8_0", "default", []),
    ):
        tokenizer = byte_vocabulary(rule)
        pairs = [[text, [*begins, *tokenizer.encode(text).ids]] for text in ASKED]
        expected[name] = {"pairs": pairs, "size": tokenizer.get_vocab_size()}
        yield name, partial(write_byte_vocabulary, rule=rule, tokenizer=tokenizer)
    (root / "texts.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")


def main(root: Path) -> None:
    """Write everything."""
    root.mkdir(parents=True, exist_ok=True)
    vocabulary = dict(texts(root))
    torch.manual_seed(3)
    llama = transformers.LlamaForCausalLM
    for name, kind in (
        ("llama-f32", Kind.F32),
        ("llama-f64", Kind.F64),
        ("llama-bf16", Kind.BF16),
        ("llama-q8_0", Kind.Q8_0),
        ("llama-q4_0", Kind.Q4_0),
        ("llama-q4_1", Kind.Q4_1),
    ):
        model = llama(llama_config(num_hidden_layers=1 if kind == Kind.F64 else 2))
        decoder(root, name, model, [kind], twin=kind not in (Kind.F64, Kind.BF16))
    decoder(root, "llama-q5", llama(llama_config()), [Kind.Q5_0, Kind.Q5_1], twin=False)
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    many = llama_config(**wide, tie_word_embeddings=True)
    decoder(root, "llama-many", llama(many), BLOCKS, twin=False)
    size = {"vocab_size": 420, "tie_word_embeddings": True}
    decoder(
        root,
        "llama-f16",
        llama(llama_config(**size)),
        [Kind.F16],
        vocabulary=vocabulary["llama-f16"],
    )
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    three = llama_config(**{**size, "vocab_size": 400}, rope_parameters=rope)
    decoder(
        root,
        "llama-three",
        llama(three),
        [Kind.Q8_0],
        vocabulary=vocabulary["llama-three"],
        twin=False,
    )
    biases = {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "num_hidden_layers": 1}
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    decoder(
        root,
        "llama-biases",
        llama(llama_config(**biases, rope_parameters=rope)),
        [Kind.F32],
        twin=False,
    )
    mixtral = transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=4)
    for name, joined in (("mixtral", True), ("mixtral-old", False)):
        mixtral.num_hidden_layers = 2 if joined else 1
        model = transformers.MixtralForCausalLM(mixtral)
        decoder(root, name, model, [Kind.Q8_0], twin=False, joined=joined)
    qwen2 = transformers.Qwen2Config(**SMALL | {"vocab_size": 400}, **HEADS)
    decoder(
        root,
        "qwen2-q8_0",
        transformers.Qwen2ForCausalLM(qwen2),
        [Kind.Q8_0],
        architecture="qwen2",
        vocabulary=vocabulary["qwen2-q8_0"],
    )
    qwen3 = transformers.Qwen3Config(**SMALL, **HEADS, head_dim=32)
    model = transformers.Qwen3ForCausalLM(qwen3)
    decoder(root, "qwen3-q4_0", model, [Kind.Q4_0], architecture="qwen3", twin=False)

    relu = transformers.T5Config(**t5_config(num_decoder_layers=1))
    t5(root, "t5-f32", transformers.T5ForConditionalGeneration(relu), [Kind.F32])
    t5(
        root,
        "t5-copied-head",
        transformers.T5ForConditionalGeneration(relu),
        [Kind.Q8_0, Kind.Q4_0, Kind.Q8_0],
    )
    # transformers 5 ties every T5 at construction, whatever the configuration says.
    gated = t5_config(feed_forward_proj="gated-gelu")
    for name, kinds in (("t5-q8_0", [Kind.Q8_0]), ("t5-f16", [Kind.F16]), ("t5-q4_1", [Kind.Q4_1])):
        own = transformers.T5Config(**gated, tie_word_embeddings=False)
        model = transformers.T5ForConditionalGeneration(own)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32) * 0.05)
        model.config.tie_word_embeddings, model.config.scale_decoder_outputs = False, False
        t5(root, name, model, kinds, vocabulary.get(name))
    umt5 = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**gated))
    umt5.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32) * 0.05)
    umt5.config.tie_word_embeddings, umt5.config.scale_decoder_outputs = False, False
    t5(root, "umt5-f32", umt5, [Kind.F32])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_gguf_fixtures.py DIRECTORY")
    main(Path(sys.argv[1]))
