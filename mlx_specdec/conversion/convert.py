"""Conversion of a checkpoint to mlx-lm's layout: plan, write, read back, compare, and move."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import system
from ..checkpoints import destination, files, writer
from ..checkpoints.other_programs import OLLAMA
from ..checkpoints.quantization import Q_BITS, WeightFormat, quantization_entry
from ..checkpoints.shards import FORMAT_NAMES, MTP_LAYERS
from ..checkpoints.source import as_directory, resolve
from ..errors import OutputError
from ..system import show_size
from .plans import plan_for
from .report import ConversionReport as ConversionReport
from .report import Plan, digesting, digests_of
from .verify import Verified, compare

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

    def downloading(done: int, total: int) -> None:
        progress("downloading", done, total)

    source = resolve(model, revision=revision, progress=downloading)
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
