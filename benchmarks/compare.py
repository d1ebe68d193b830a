"""Compare the speed of a pair with mlx-lm's and, if torch is installed, with transformers':

    python benchmarks/compare.py PROMPTS --model MODEL [--draft-model DRAFT] [--num-draft 1,3] ...
    python benchmarks/compare.py PROMPTS --model MODEL --batch-size 1,4,16

All methods run in turns. Prints one JSON object with the tokens per second of each. transformers
receives the weights from memory. This program imports torch only after it has disabled the Hub."""

import argparse
import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec import SpecdecError, load, system

if __name__ == "__main__":
    system.load_blas()

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.source import as_directory, resolve
from mlx_specdec.core.options import Options
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import first_line
from mlx_specdec.measure.figures import tokens_per_second
from mlx_specdec.measure.methods import (
    Length,
    Method,
    Prompts,
    Sample,
    Texts,
    encoded,
    file_methods,
    measure,
    own_methods,
)
from mlx_specdec.models.loading import is_encoder_decoder
from mlx_specdec.models.number_format import expanded, twin_of
from mlx_specdec.models.patches import LIGHT_LAYERS
from mlx_specdec.text.prompts import read_prompts

PREFILL_BATCH_SIZE = 8
"""Number of prompts that mlx-lm prefills together by default."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
HEAD = "lm_head.weight"
T5 = "t5"
"""The `model_type` of the network of T5, mT5 and UMT5."""
_OURS = ("quantization", "quantization_config", "auto_map", "dtype", "torch_dtype")
"""Entries of config.json that transformers must not see: they describe stored weights, or code."""


Runner = Callable[[Sequence[int]], Sample]


class NoBaselineError(Exception):
    """An error that says in one line why a baseline cannot run on this machine."""


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore MKL's number of threads after a block that may import torch, which changes it."""
    if system.blas_name() != "mkl":
        yield
        return
    mkl = ctypes.CDLL(None)  # system.load_blas makes the functions of MKL global
    before = mkl.MKL_Get_Max_Threads()
    try:
        yield
    finally:
        mkl.MKL_Set_Num_Threads(ctypes.c_int(before))


def as_mlx_has_it(network: nn.Module) -> nn.Module:
    """Return a copy of a network with MLX's own layers. The copy shares the parameters."""
    copied: nn.Module = twin_of(network, {})
    for module in copied.modules():
        LIGHT_LAYERS.undo(module)
    return copied


@dataclass(frozen=True)
class HuggingFace:
    """The imported packages, and the number of threads that torch uses."""

    torch: Any
    transformers: Any
    threads: int

    @contextmanager
    def at_work(self, seed: int) -> Iterator[None]:
        """Run torch without gradients, with these threads and with a seeded generator. Afterwards,
        restore the number of threads of the BLAS library, which torch and MLX may share."""
        with threads_kept(), self.torch.inference_mode():
            self.torch.set_num_threads(self.threads)
            self.torch.manual_seed(seed)
            yield

    def describe(self) -> str:
        """Return the versions, the dtype and the number of threads in words."""
        return (
            f"transformers {self.transformers.__version__} on torch {self.torch.__version__}: CPU, "
            f"float32, {self.threads} thread{'s' if self.threads > 1 else ''}"
        )


def hugging_face() -> HuggingFace:
    """Import torch and transformers. Raises NoBaselineError if one of them cannot be imported."""
    try:
        # The import of torch may already change the number of threads.
        with threads_kept():
            torch = importlib.import_module("torch")
            os.environ.update(dict.fromkeys(OFFLINE, "1"))
            transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as problem:
        raise NoBaselineError(f"{problem.name} is not installed") from None
    except (ImportError, OSError, RuntimeError) as problem:
        raise NoBaselineError(f"it does not load: {first_line(problem)}") from problem
    transformers.utils.logging.set_verbosity_error()
    # The default of torch is the number of threads of the BLAS library that MLX uses.
    limit = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(limit) if limit.isdecimal() and int(limit) else os.cpu_count() or 1
    return HuggingFace(torch, transformers, threads)


def try_out(run: Callable[[], object]) -> None:
    """Call `run` before a long measurement. Raises NoBaselineError if it fails."""
    try:
        run()
    except Exception as problem:  # other programs raise all kinds of errors
        raise NoBaselineError(f"it cannot generate: {first_line(problem)}") from problem


def any_token(pair: Pair) -> int:
    """Return a token id of the pair with which to try a program."""
    return min(pair.vocabulary - 1, 2)


def find_baselines(
    mlx_lm: Callable[[Pair, Options, Sequence[Any]], list[Method]],
    transformers: Callable[[Pair, Options, Sequence[Any], HuggingFace], list[Method]],
    pair: Pair,
    options: Options,
    over: Sequence[Length],
) -> tuple[list[Method], list[str]]:
    """Return the methods of other programs, which the first two functions return, and notes on
    their versions or why they cannot run. `over` are draft lengths, or batch sizes."""
    methods: list[Method] = []
    notes: list[str] = []
    try:
        methods += mlx_lm(pair, options, over)
    except NoBaselineError as problem:
        notes.append(f"mlx-lm is left out: {problem}")
    try:
        hugging = hugging_face()
        methods += transformers(pair, options, over, hugging)
        notes.append(hugging.describe())
    except NoBaselineError as problem:
        notes.append(f"transformers is left out: {problem}")
    return methods, notes


def mlx_lm_methods(pair: Pair, options: Options, lengths: Sequence[Length]) -> list[Method]:
    """Return mlx-lm's plain decoding and, if there is a draft, its speculative decoding. They use
    the weights of the pair. The first token is part of the prefill, and is not counted. Raises
    NoBaselineError if mlx-lm cannot run the pair."""
    networks = [_network(pair)]
    fixed = [0]
    if pair.draft is not None and pair.draft.kind == "decoder-only":
        networks.append(as_mlx_has_it(pair.draft.network))
        fixed += [n for n in lengths if n != "auto"]
    runs = {length: _runner(networks, pair.eos_token_ids, options, length) for length in fixed}
    return _methods("mlx-lm", options.temperature == 0, runs)


def one_by_one(run: Runner) -> Callable[[Prompts], Texts]:
    """Return a method's function that decodes each prompt alone by `run`."""
    return lambda prompts: ((at, run(prompt)) for at, prompt in enumerate(prompts))


def room(pair: Pair, options: Options, prompt: Sequence[int]) -> int:
    """Return the maximum number of tokens to generate."""
    longest = pair.target.max_length
    free = sys.maxsize if longest is None else longest - len(pair.target.prefix(prompt))
    return min(options.max_tokens, free)


def _methods(name: str, same_text: bool, runs: Mapping[int, Runner]) -> list[Method]:
    """Return the methods of a program. The keys of `runs` are draft lengths."""
    return [
        Method(f"{name} {length or 'plain'}", name, length, same_text, one_by_one(run))
        for length, run in runs.items()
    ]


def mlx_lm_file_methods(pair: Pair, options: Options, sizes: Sequence[int]) -> list[Method]:
    """Return mlx-lm's batch generation. Raises NoBaselineError if it cannot run the model."""
    run = partial(_batches, _network(pair), pair, options)
    return _file_methods("mlx-lm", options.temperature == 0, run, pair, sizes)


def _file_methods(
    name: str,
    same_text: bool,
    run: Callable[[int, Prompts], Texts],
    pair: Pair,
    sizes: Sequence[int],
) -> list[Method]:
    token = any_token(pair)
    try_out(lambda: list(run(2, [[token], [token, token]])))
    return [
        Method(f"{name} plain, batch {size}", name, 0, same_text, partial(run, size), size)
        for size in sizes
    ]


def _batches(network: Any, pair: Pair, options: Options, size: int, prompts: Prompts) -> Texts:
    """Generate as mlx_lm.generate.batch_generate does, but include EOS and yield texts early."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(
        network,
        stop_tokens=[[token] for token in sorted(pair.eos_token_ids)],
        sampler=_sampler(options),
        completion_batch_size=size,
        prefill_batch_size=min(size, PREFILL_BATCH_SIZE),
    )
    rooms = [room(pair, options, prompt) for prompt in prompts]
    numbers = {uid: n for n, uid in enumerate(generator.insert(list(map(list, prompts)), rooms))}
    texts: list[list[int]] = [[] for _ in prompts]
    with closing(generator):
        while responses := generator.next_generated():
            for response in responses:
                tokens = texts[numbers[response.uid]]
                tokens.append(response.token)
                if response.finish_reason is not None:
                    yield numbers[response.uid], Sample(tuple(tokens), len(tokens), 0.0)


def _network(pair: Pair) -> Any:
    if pair.target.kind != "decoder-only" or pair.translation is not None:
        raise NoBaselineError("it has no model of this kind")
    return as_mlx_has_it(pair.target.network)


def _sampler(options: Options) -> Any:
    from mlx_lm.sample_utils import make_sampler

    return make_sampler(
        temp=options.temperature,
        top_p=options.top_p if options.top_p < 1 else 0.0,
        min_p=options.min_p,
        top_k=options.top_k,
    )


def _runner(networks: Sequence[Any], eos: frozenset[int], options: Options, length: int) -> Runner:
    from mlx_lm.generate import generate_step, speculative_generate_step

    settings: dict[str, Any] = {"max_tokens": options.max_tokens, "sampler": _sampler(options)}

    def run(prompt: Sequence[int]) -> Sample:
        ids = mx.array(list(prompt))
        if length:
            steps = speculative_generate_step(ids, *networks, num_draft_tokens=length, **settings)
        else:
            steps = generate_step(ids, networks[0], **settings)
        tokens: list[int] = []
        started, rounds = perf_counter(), 0
        # Steps are (token, log-probabilities), with speculation also whether it was drafted.
        for token, _, *drafted in steps:
            if not tokens:
                started = perf_counter()
            else:
                rounds += not any(drafted)
            tokens.append(int(token))
            if tokens[-1] in eos:
                break
        return Sample(tuple(tokens), max(0, len(tokens) - 1), perf_counter() - started, rounds)

    return run


def weights(network: nn.Module) -> dict[str, np.ndarray]:
    """Return all weights by their names in the checkpoint, dequantized and in float32."""
    arrays = dict(tree_flatten(network.parameters()))
    for path, module in network.named_modules():
        if hasattr(module, "bits"):
            arrays = {name: a for name, a in arrays.items() if not name.startswith(f"{path}.")}
            dequantized = tree_flatten(expanded(module).parameters())
            arrays.update((f"{path}.{name}", array) for name, array in dequantized)
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def settings(config: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Return config.json for transformers, whose T5 scales outputs by tie_word_embeddings."""
    adapted = {name: value for name, value in config.items() if name not in _OURS}
    if network.model_type == T5:
        adapted["tie_word_embeddings"] = network.config.scales_output
        adapted.pop("scale_decoder_outputs", None)
    return adapted


def build(hugging: HuggingFace, config: Mapping[str, Any], network: Any) -> Any:
    """Return the float32 model in transformers, on the CPU, with the weights of `network`. Raises
    NoBaselineError if transformers has no such model, or if its tensors differ."""
    auto = hugging.transformers.AutoModelForCausalLM
    if is_encoder_decoder(config):
        auto = hugging.transformers.AutoModelForSeq2SeqLM
    adapted = settings(config, network)
    try:
        model = auto.from_config(
            hugging.transformers.AutoConfig.for_model(**adapted),
            dtype=hugging.torch.float32,
            trust_remote_code=False,
        )
    except Exception as problem:  # transformers raises all kinds of errors
        raise NoBaselineError(
            f"it does not build a model of type {adapted.get('model_type')}: {first_line(problem)}"
        ) from problem
    tensors = {name: hugging.torch.from_numpy(array) for name, array in weights(network).items()}
    expected = model.state_dict()
    # named_parameters lists tied parameters once, under their first name.
    lacking = {name for name, _ in model.named_parameters()} - tensors.keys()
    common = tensors.keys() & expected.keys()
    misshapen = {name for name in common if tensors[name].shape != expected[name].shape}
    if strange := sorted((tensors.keys() - expected.keys()) | lacking | misshapen):
        raise NoBaselineError(f"its model has other tensors than ours, {strange[0]} among them")
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    if HEAD in tensors:
        # transformers 5 ties every T5, whatever its configuration says.
        model.lm_head.weight = hugging.torch.nn.Parameter(tensors[HEAD], requires_grad=False)
    if network.model_type == T5:
        # transformers 5 reads the configuration after the model was built, and wrongly: it creates
        # as many cache layers as the encoder has layers, although the decoder uses them.
        model.config.num_layers = network.config.num_decoder_layers
        if model.config.model_type == "umt5":
            model.config.tie_word_embeddings = network.config.scales_output
    model.generation_config = hugging.transformers.GenerationConfig()
    return model.eval()


@dataclass(frozen=True)
class _Generation:
    """A generation by `model`, the target in transformers."""

    pair: Pair
    options: Options
    hugging: HuggingFace
    model: Any

    @property
    def same_text(self) -> bool:
        """Whether outputs should equal plain decoding. Sampled outputs use other random numbers."""
        return self.options.temperature == 0 and self.pair.dtype == "float32"

    def run_all(self, size: int, prompts: Prompts) -> Texts:
        """Decode all prompts. Each call decodes `size` prompts of similar length."""
        # Prompts of an encoder are padded on the right.
        left = self.pair.target.kind == "decoder-only"
        order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]), reverse=True)
        for group in (order[start : start + size] for start in range(0, len(order), size)):
            # The longest prompt limits the number of generated tokens.
            longest, eos = len(prompts[group[0]]), self.pair.eos_token_ids
            settings = _settings(self.pair, self.options, prompts[group[0]])
            rows = [_padded(prompts[n], longest, settings["pad_token_id"], left) for n in group]
            mask = [_padded([1] * len(prompts[n]), longest, 0, left) for n in group]
            made = self._generate(rows, mask, settings)
            for number, row in zip(group, made.tolist(), strict=True):
                # The row begins with the padded prompt, or with the decoder's start token.
                tokens = row[longest if left else 1 :]
                ends = (at for at, token in enumerate(tokens, start=1) if token in eos)
                tokens = tuple(tokens[: next(ends, len(tokens))])
                yield number, Sample(tokens, len(tokens), 0.0)

    def run(self, prompt: Sequence[int], draft: Any = None, length: int = 0) -> Sample:
        """Decode one prompt. If there is a draft, `length` is its number of draft tokens."""
        rest = {}
        if draft is not None:
            draft.generation_config = self.hugging.transformers.GenerationConfig(
                num_assistant_tokens=length,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
            rest["assistant_model"] = draft
        listener, settings = Listener(), _settings(self.pair, self.options, prompt)
        self._generate([list(prompt)], [[1] * len(prompt)], settings, streamer=listener, **rest)
        return listener.sample()

    def _generate(self, rows: Any, mask: Any, settings: Mapping[str, Any], **rest: Any) -> Any:
        torch, configured = self.hugging.torch, self.hugging.transformers.GenerationConfig
        with self.hugging.at_work(self.options.seed):
            return self.model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                generation_config=configured(**settings),
                **rest,
            )


def transformers_methods(
    pair: Pair, options: Options, lengths: Sequence[Length], hugging: HuggingFace
) -> list[Method]:
    """Return plain decoding and, if the draft can be an assistant model, assisted decoding with all
    draft lengths. Raises NoBaselineError if transformers cannot run the pair."""
    generation = _generation(pair, options, hugging)
    runs: dict[int, Runner] = {0: generation.run}
    assisted = [length for length in lengths if length != "auto" and length > 0]
    # An assistant model must have the target's vocabulary.
    if pair.draft is not None and pair.translation is None and assisted:
        draft = _built(hugging, str(pair.draft_name), pair.draft)
        runs |= {n: partial(generation.run, draft=draft, length=n) for n in assisted}
    for run in runs.values():
        try_out(partial(run, [any_token(pair)] * 2))
    return _methods("transformers", generation.same_text, runs)


def transformers_file_methods(
    pair: Pair, options: Options, sizes: Sequence[int], hugging: HuggingFace
) -> list[Method]:
    """Return plain decoding with each batch size. Raises NoBaselineError if it cannot run."""
    generation = _generation(pair, options, hugging)
    name, same_text = "transformers", generation.same_text
    return _file_methods(name, same_text, generation.run_all, pair, sizes)


def _generation(pair: Pair, options: Options, hugging: HuggingFace) -> _Generation:
    if pair.heads is not None:
        raise NoBaselineError("it has no Medusa heads: name their base model as the model")
    return _Generation(pair, options, hugging, _built(hugging, pair.name, pair.target))


def _built(hugging: HuggingFace, name: str, model: Any) -> Any:
    with as_directory(resolve(name)) as directory:
        config = files.read_config(directory)
    return build(hugging, config, model.network)


def _settings(pair: Pair, options: Options, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the settings of transformers, which applies filters in the same order."""
    eos, sampled = sorted(pair.eos_token_ids), options.temperature > 0
    names = ("temperature", "top_k", "top_p", *(["min_p"] if options.min_p else []))
    return {
        "max_new_tokens": room(pair, options, prompt),
        "eos_token_id": eos or None,
        "pad_token_id": eos[0] if eos else 0,
        "decoder_start_token_id": pair.target.prefix(prompt)[-1],
        "do_sample": sampled,
        **{name: value for name, value in vars(options).items() if sampled and name in names},
    }


def _padded(row: Sequence[int], length: int, token: int, left: bool) -> list[int]:
    padding = [token] * (length - len(row))
    return [*padding, *row] if left else [*row, *padding]


class Listener:
    """A streamer that records the times of the prompt and of the tokens of each round. It does not
    count the tokens of the first round, whose time includes the prefill."""

    def __init__(self) -> None:
        self._rounds: list[tuple[float, Any]] = []

    def put(self, tokens: Any) -> None:
        """Record tokens, a CPU tensor of shape (n,) or (1, n)."""
        self._rounds.append((perf_counter(), tokens))

    def end(self) -> None:
        """Do nothing; transformers calls it at the end."""

    def sample(self) -> Sample:
        """Return the tokens and their time."""
        rounds = [(at, tokens.reshape(-1).tolist()) for at, tokens in self._rounds[1:]]
        tokens = tuple(int(token) for _, ids in rounds for token in ids)
        if not rounds:
            return Sample((), 0, 0.0, 0)
        (first, together), (last, _) = rounds[0], rounds[-1]
        return Sample(tokens, len(tokens) - len(together), last - first, len(rounds) - 1)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--num-draft", type=numbers, default=[3])
    parser.add_argument("--batch-size", type=numbers)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", "-m", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    options = Options(max_tokens=given.max_tokens, temperature=given.temperature, cost_cache=False)
    sizes, lengths, repeats = given.batch_size, given.num_draft, given.repeats
    try:
        prompts = read_prompts(given.prompts, given.limit)
        pair = load(given.model, given.draft_model)
        if sizes is None:
            programs = mlx_lm_methods, transformers_methods
            others, notes = find_baselines(*programs, pair, options, lengths)
            own = own_methods([pair], options, [], lengths)
        else:
            files_of = mlx_lm_file_methods, transformers_file_methods
            others, notes = find_baselines(*files_of, pair, options, sizes)
            own, remarks = file_methods(pair, options, None, lengths[0], sizes)
            notes += remarks
        found = measure(prompts, [*own, *others], partial(encoded, pair, options), repeats=repeats)
        speeds = {name: tokens_per_second(made) for name, made in found.samples.items()}
    except SpecdecError as problem:
        sys.exit(f"error: {problem}")
    print(json.dumps({"tokens_per_second": speeds, "notes": notes}, indent=1))


if __name__ == "__main__":
    main()
