"""Conversion of a checkpoint to mlx-lm's layout: plan, write, read back, compare, and move."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import system
from ..checkpoints import destination, files, writer
from ..checkpoints.quantization import Q_BITS, WeightFormat, quantization_entry
from ..checkpoints.shards import FORMAT_NAMES, MTP_LAYERS
from ..checkpoints.source import as_directory, resolve
from ..checkpoints.stored_models import OLLAMA
from ..errors import CheckpointError, OutputError, PromptError, SpecdecError
from ..models.base import Base
from ..models.loading import Loaded, load_model
from ..system import show_size
from ..text.tokenizer import load_tokenizer
from .plans import plan_for
from .report import ConversionReport as ConversionReport
from .report import Plan, TextChange, Verified, digesting, digests_of

WRITTEN = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(MTP_LAYERS, "provenance.json", "README.md", *files.CARRIED),
)
"""Patterns of the files of a result."""
OTHER_FILES_BYTES = 10_000_000
"""Disk space for configuration and tokenizer files, in bytes."""
POOR = 0.9
"""Share of positions with the same most likely token on the fixed text, below which a quantized
result gets a warning. A Llama with 135 M weights answered simple questions wrongly at 0.6."""
SHARE_TO_QUANTIZE = 0.5
"""The user gets a notice if less than this share of the weights is quantized."""
SHARE_OF_SHARD, QUICK_BYTES = 1.2, 600_000_000
"""Limits of a model's size in memory when its logits are compared, as a multiple of the largest
file of a result and in bytes. The second does not hold for quantized results: running both models
takes longer than the conversion."""
BYTES_PER_LOADED_WEIGHT = 6
"""Bytes per weight while a model is loaded in float32: 4 for the weight and 2 for its source."""
SAME_LOGITS = 1e-3
"""Largest difference of log-probabilities if no weight has changed."""
LONGEST_SCORED = 256
"""The most tokens of a fixed text that are scored."""
_TEXTS = json.loads(Path(__file__).with_name("fixed_texts.json").read_text(encoding="utf-8"))
PAIRS: list[list[str]] = _TEXTS["pairs"]
"""[prompt, completion] for encoder-decoder models. Do not change the fixed texts: perplexities
would no longer be comparable with reported ones."""
PASSAGE = "\n".join(_TEXTS["passage"])
"""The fixed text for decoder-only models."""
Progress = Callable[[str, int, int], None]


def convert(
    model: str,
    mlx_path: Path | None = None,
    *,
    dtype: str | None = None,
    quantize: int | str | None = None,
    q_group_size: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda step, done, total: None,
) -> ConversionReport:
    """Convert a model or a hidden-state drafter to mlx-lm's layout, and verify the result.

    The source is read once. The result appears at `mlx_path` only if every step succeeds. The
    logits and texts of source and result are compared if that is quick. A conversion takes the
    memory of the largest tensor, such as the joined experts of a layer. Raises SpecdecError.

    Args:
        model: A directory, a file, or a repository of the Hub.
        mlx_path: The directory of the result; None means weights/NAME.
        dtype: The dtype of weights that are not quantized; None keeps the stored one.
        quantize: The number of bits of quantized matrices (2, 3, 4, 5, 6 or 8). It may also be the
            name of a format of MLX ("mxfp4", "nvfp4" or "mxfp8") or of a mixture of mlx-lm
            ("mixed_3_6" and others). "none" dequantizes a quantized source. None changes nothing.
        q_group_size: The number of weights that share a scale; None means the format's default.
        revision: The branch, tag or commit of the Hub.
        overwrite: Whether a model at `mlx_path` is replaced.
        progress: Is called with a step in words, the bytes that are done, and all bytes.
    """
    weight_format = WeightFormat.checked(dtype, quantize, q_group_size)
    local = Path(os.path.expanduser(model))
    path = _destination(model, local, mlx_path)
    destination.check_free(path, overwrite=overwrite, source=local, written=WRITTEN)

    source = resolve(model, revision=revision, progress=partial(progress, "downloading"))
    name, commit = source.resolve().name, None
    if not os.path.exists(local):
        name, commit = model, source.name if source.parent.name == "snapshots" else None
    with as_directory(source) as directory:
        plan = plan_for(directory, weight_format)
        notes = (*plan.notes, *_notes(plan, weight_format, directory))
        outputs = plan.outputs(dtype)
        extra = [writer.ResultTensor(name, one, one.size) for name, one in plan.extra.items()]
        result_nbytes = sum(output.nbytes for output in (*outputs, *extra))
        source_nbytes = sum(output.source.nbytes for output in (*outputs, *extra))
        needed, instead = result_nbytes + OTHER_FILES_BYTES, ", or choose another --mlx-path"
        system.check_room(path, needed, str(path), OutputError, instead)
        config = [source / "config.json"] if (source / "config.json").is_file() else []
        paths = [*plan.weights.paths, *config]
        files_nbytes = sum(file.stat().st_size for file in paths)
        of_source: dict[str, Mapping[str, Any]] = {}
        digests = digesting(paths, of_source)
        step = f"converting {show_size(files_nbytes)} to {show_size(result_nbytes)}"
        total, done, digested = source_nbytes + result_nbytes, 0, 0

        def advance(nbytes: int) -> None:
            nonlocal done, digested
            done += nbytes
            # Bytes that a conversion has just read are still in the system's page cache.
            while digested < files_nbytes * done // max(1, source_nbytes):
                digested += next(digests, files_nbytes)
            if done < total:
                progress(step, done, total)

        progress(step, 0, total)
        with destination.directory(path, result_nbytes) as work:
            plan.tensors.clear()  # a tensor that mlx-lm joins is freed as soon as it is written
            written = writer.write_weights(
                work, outputs, shard_bytes=system.default_shard_bytes(), progress=advance
            )
            if extra:
                writer.write_file(work / MTP_LAYERS, extra, written, advance, layout="pt")
            _write_others(work, directory, plan, weight_format)
            of_result = {
                **{f.name: writer.read_back(f, sums, advance) for f, sums in written.files.items()},
                **digests_of([*work.glob("*.index.json"), work / "config.json"]),
            }
            verified = Verified(None, None, plan.not_run)
            if not plan.not_run:
                step = "comparing what source and result compute"
                progress(step, 0, total)
                verified = compare(directory, work, written)
            for _ in digests:
                pass
            report = ConversionReport(
                path=path,
                name=name,
                revision=commit,
                format=FORMAT_NAMES[plan.weights.format],
                source=of_source,
                result=of_result,
                dtype=weight_format.describe(),
                written=written,
                tensor_report=plan.report,
                notes=(*notes, *filter(None, [plan.weights.note()])),
                verified=verified,
                verdict=_verdict(verified, weight_format),
            )
            report.write(work)
        progress(step, total, total)
    return report


def _write_others(work: Path, directory: Path, plan: Plan, weight_format: WeightFormat) -> None:
    """Write config.json and the tokenizer files of the result."""
    for file in files.tokenizer_files(directory):
        shutil.copyfile(file, work / file.name)
    names = {"dtype", "torch_dtype"} & plan.config.keys() if weight_format.dtype is not None else ()
    config = {**plan.config, **dict.fromkeys(names, weight_format.dtype)}
    if (how := weight_format.quantization) is not None:
        made = {name.removesuffix(".weight"): of_one for name, of_one in plan.quantized.items()}
        config["quantization"] = quantization_entry(made, how)
    writer.write_config(work, config)


def _destination(model: str, local: Path, mlx_path: Path | None) -> Path:
    if mlx_path is not None:
        path = Path(mlx_path).expanduser()
        return path if path.name not in ("", "..") else path.resolve()
    name = local.resolve().name if os.path.exists(local) else model.rstrip("/").rpartition("/")[2]
    name = name.removeprefix(OLLAMA).replace(":", "-")
    if os.path.isfile(local):
        name = Path(name).stem
    if not name.strip():
        name = resolve(model).name
    return Path("weights") / name


def _notes(plan: Plan, weight_format: WeightFormat, directory: Path) -> Iterator[str]:
    if (how := weight_format.quantization) is not None:
        share = sum(map(plan.parameters, plan.quantized)) / max(1, plan.total_parameters)
        if share < SHARE_TO_QUANTIZE:
            yield (
                f"quantized only {share:.0%} of the weights: the rows of the others do not divide "
                f"into groups of {how.group_size}, try a smaller --q-group-size"
            )
    # ByT5's tokenizer needs no files.
    alone = plan.config.get("tokenizer_class") == "ByT5Tokenizer"
    if not plan.not_run and not alone and not files.vocabulary_file(directory):
        yield "the source has no tokenizer files: the result cannot read text yet"


def _verdict(verified: Verified, weight_format: WeightFormat) -> str:
    """Return a warning if quantization changed many of the most likely tokens, or ""."""
    text, how = verified.text, weight_format.quantization
    if how is None or text is None or text.same_first >= POOR:
        return ""
    changed = f"the likeliest token changed at {1 - text.same_first:.0%} of the positions"
    more = next((bits for bits in Q_BITS if bits > how.bits), None)
    instead = (
        " in place of the mode or predicate" if how.mode != "affine" or weight_format.mixed else ""
    )
    advice = "" if more is None else f"take --q-bits {more}{instead}, or "
    return f"this conversion loses a lot, {changed}: {advice}leave --quantize out"


def compare(source: Path, result: Path, written: writer.Written) -> Verified:
    """Compare what source and result compute, if that is fast enough: log-probabilities on a fixed
    input, and the scores of a fixed text if weights were quantized. Raises CheckpointError if the
    result computes something else than the source."""
    quantized = True in written.largest
    needed = written.parameters * BYTES_PER_LOADED_WEIGHT
    if needed > SHARE_OF_SHARD * system.default_shard_bytes():
        return Verified(None, None, "a whole model takes too much memory")
    if not quantized and needed > QUICK_BYTES:
        return Verified(None, None, "it would take longer than the conversion")
    rows, scores, problems = zip(
        *(_answers(place, result, quantized) for place in (source, result)), strict=True
    )
    # Ids that are never written have -inf in both.
    apart = mx.where(rows[0] == rows[1], 0.0, mx.abs(rows[0] - rows[1]))
    difference = mx.max(apart).item()
    assert isinstance(difference, float)
    unchanged = not quantized and written.largest.get(False, (0.0,))[0] == 0
    if math.isnan(difference) or (unchanged and difference > SAME_LOGITS):
        differ = f"(log-probabilities differ by {difference:.3g}): please report this checkpoint"
        raise CheckpointError(f"the converted model does not compute what its source does {differ}")
    problem = next(filter(None, problems), "")
    return Verified(difference, _change(*scores) if quantized and not problem else None, problem)


def _answers(
    directory: Path, tokenizer: Path, with_text: bool
) -> tuple[mx.array, tuple[mx.array, mx.array], str]:
    """Return log-probabilities on a fixed input, (tokens, vocabulary) float32, the scores of the
    fixed text, and why there are none, or ""."""
    # Dequantized weights have the same values and are much faster on a CPU.
    loaded = load_model(directory, dtype="float32", expand=True)
    rows = _log_probabilities(loaded.model, range(2, 10), range(2, 7))
    mx.eval(rows)
    scores, problem = (mx.array([]), mx.array([])), ""
    try:
        if with_text:
            scores = _score_text(loaded, tokenizer)
    except SpecdecError as caught:  # the model was loaded, so the tokenizer is the problem
        problem = str(caught)
    del loaded
    mx.clear_cache()
    return rows, scores, problem


def _change(first: tuple[mx.array, mx.array], second: tuple[mx.array, mx.array]) -> TextChange:
    changes = mx.abs(second[0] - first[0])
    same: mx.array = first[1] == second[1]
    means: list[Any] = [mx.mean(scores).item() for scores, _ in (first, second)]
    before, after = (math.exp(min(-mean, 700.0)) for mean in means)
    return TextChange(
        tokens=changes.size,
        source_perplexity=before,
        result_perplexity=after,
        mean=mx.mean(changes).item(),  # type: ignore[arg-type]
        largest=mx.max(changes).item(),  # type: ignore[arg-type]
        same_first=mx.mean(same.astype(mx.float32)).item(),  # type: ignore[arg-type]
    )


def _score_text(loaded: Loaded, tokenizer: Path) -> tuple[mx.array, mx.array]:
    """Return the log-probability of each token of the fixed text, (tokens,) float32, and the token
    that the model finds most likely at each position, (tokens,) integer. Raises CheckpointError,
    PromptError."""
    encode = load_tokenizer(tokenizer, kind=loaded.model.kind).encode
    if loaded.model.kind == "encoder-decoder":
        texts = [(encode(prompt), encode(text)) for prompt, text in PAIRS]
    else:
        ids = encode(PASSAGE)
        texts = [(ids[:1], ids[1:])]
    scores, top = [], []
    for prompt, text in texts:
        longest = loaded.model.max_length
        text = text[: LONGEST_SCORED if longest is None else min(LONGEST_SCORED, longest - 1)]
        if not text or max(text) >= loaded.model.vocabulary:
            raise PromptError("the tokenizer makes ids of it that the model does not have")
        rows = _log_probabilities(loaded.model, prompt, text)
        scores.append(mx.take_along_axis(rows, mx.array(text)[:, None], axis=-1)[:, 0])
        top.append(mx.argmax(rows, axis=-1))
        mx.eval(scores[-1], top[-1])
    return mx.concatenate(scores), mx.concatenate(top)


def _log_probabilities(model: Base, prompt: Sequence[int], text: Sequence[int]) -> mx.array:
    """Return the log-probabilities that predict a text, (tokens, vocabulary)."""
    fed = mx.array([[*model.prefix(prompt)[-1:], *text[:-1]]], dtype=mx.int32)
    logits = model.open_batch([prompt]).advance(fed).logits[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
