"""Conversion of a checkpoint to mlx-lm's layout: plan, write, verify, move into place, upload."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from .. import system
from ..checkpoints import destination, files, mtp_layers, writer
from ..checkpoints.formats.safetensors import SafetensorsFile
from ..checkpoints.hub import is_network_error
from ..checkpoints.quantization import Q_BITS, WeightFormat
from ..checkpoints.shards import FORMAT_NAMES
from ..checkpoints.source import as_directory, resolve
from ..errors import OptionError, OutputError, first_line
from ..system import show_size
from .plan import Plan
from .plans import plan_for
from .report import ConversionReport as ConversionReport
from .report import digests_of
from .verify import TextChange, Verified, compare, verify

_UPLOAD_REPOSITORY = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", re.ASCII)


def upload(directory: Path, repository: str, *, base_model: str | None, drafts: bool) -> None:
    """Write a model card into `directory` and upload the directory. base_model: The Hub name of the
    source, None for a local source. drafts: Whether the result is a drafter. Raises OutputError."""
    import huggingface_hub as hub

    usage = f"--model TARGET --draft-model {repository}" if drafts else f"--model {repository}"
    base = "" if base_model is None else f"base_model: {base_model}\n"
    card = (
        f"---\nlibrary_name: mlx\ntags:\n- mlx\n{base}---\n\n# {repository}\n\n"
        "Converted with mlx-specdec; provenance.json says from what and how.\n\n"
        f'    mlx-specdec generate {usage} "..."\n'
    )
    try:
        (directory / "README.md").write_text(card, encoding="utf-8")
        api = hub.HfApi()
        api.create_repo(repo_id=repository, exist_ok=True)
        api.upload_folder(folder_path=str(directory), repo_id=repository, repo_type="model")
    except Exception as problem:  # exceptions of huggingface_hub's HTTP library have no common base
        first = "check the network" if is_network_error(problem) else "run `hf auth login`"
        raise OutputError(
            f"{directory} is converted, and cannot be uploaded to {repository}: "
            f"{first_line(problem):.300}: {first}, then run `hf upload {repository} {directory}`"
        ) from problem


SCRATCH = "scratch"
"""Directory for temporary files within the result, which is removed in the end."""
WRITTEN = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(mtp_layers.FILE, "provenance.json", "README.md", *files.CARRIED),
)
"""Patterns of the files of a result."""
OTHER_FILES_BYTES = 10_000_000
"""Disk space for configuration and tokenizer files, in bytes."""
POOR = 0.9
"""Share of positions with the same most likely token on the fixed text, below which a quantized
result gets a warning. A Llama with 135 M weights answered simple questions wrongly at 0.6."""
GROWTH_TO_ANNOUNCE, SHARE_TO_QUANTIZE = 1.5, 0.5
"""The user gets a notice if the result is larger than this multiple of the source, or if less than
this share of the weights is quantized."""


def convert(
    model: str,
    mlx_path: Path | None = None,
    *,
    dtype: str | None = None,
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    quant_predicate: str | None = None,
    dequantize: bool = False,
    upload_repo: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    shard_bytes: int | None = None,
    compare_logits: Callable[[Path, Path], float] | None = None,
    compare_text: Callable[[Path, Path], TextChange] | None = None,
    announce: Callable[[str], None] = lambda sentence: None,
    working: Callable[[str], AbstractContextManager[object]] = nullcontext,
    progress: Callable[[int, int], None] | None = None,
    download_progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Convert a model or a hidden-state drafter to mlx-lm's layout, and verify the result.

    The result appears at `mlx_path` only if every step succeeds. A conversion takes at most 1.2
    times `shard_bytes` plus 300 MB of memory. Raises SpecdecError.

    Args:
        model: A directory, a file, or a repository of the Hub.
        mlx_path: The directory of the result; None means weights/NAME.
        dtype: The dtype of weights that are not quantized; None keeps the stored one.
        quantize: Whether matrices are quantized.
        q_bits, q_group_size: Size of the quantization; None means the default of `q_mode`.
        q_mode: MLX's name of the quantization format.
        quant_predicate: mlx-lm's name of a mixture of bits.
        dequantize: Whether quantized matrices of the source are dequantized.
        upload_repo: The Hub name to upload the result to.
        shard_bytes: The most bytes in a file of the result; None means 4 GB, or a quarter of a
            small machine's memory.
        compare_logits, compare_text: See `verify.verify`.
        announce: Called before the work begins, with a sentence about an unexpected size.
        working: Returns a context for a step without progress, whose description it gets.
        progress: Called with (done, total) bytes. Each byte is read to write and to verify it.
        download_progress: Called with (done, total) bytes of a download.
    """
    shard_bytes = system.default_shard_bytes() if shard_bytes is None else shard_bytes
    weight_format = WeightFormat.checked(
        dtype=dtype,
        quantize=quantize,
        bits=q_bits,
        group_size=q_group_size,
        mode=q_mode,
        mixed=quant_predicate,
        dequantize=dequantize,
    )
    if shard_bytes < 1:
        raise OptionError(f"a shard needs at least one byte, not {shard_bytes}")
    if upload_repo is not None and not _UPLOAD_REPOSITORY.fullmatch(upload_repo):
        raise OptionError(f"{upload_repo!a:.100} is no repository: give --upload-repo USER/NAME")
    local = Path(os.path.expanduser(model))
    path = _destination(model, local, mlx_path)
    destination.check_free(path, overwrite=overwrite, source=local, written=WRITTEN)
    source = resolve(model, revision=revision, progress=download_progress)
    name, commit = source.resolve().name, None
    if not os.path.exists(local):
        name, commit = model, source.name if source.parent.name == "snapshots" else None
    with as_directory(source) as directory:
        plan = plan_for(directory, weight_format)
        change = plan.changes(dtype)
        nbytes = writer.stored_nbytes(plan.outlines, change) + plan.extra_nbytes
        before = sum(file.stat().st_size for file in plan.paths)
        if nbytes > GROWTH_TO_ANNOUNCE * before:
            why = "; ".join(plan.notes[:1]) or "its quantized weights become whole"
            announce(f"the source's {show_size(before)} become {show_size(nbytes)}: {why}")
        destination.check_room(path, nbytes + plan.scratch_nbytes + OTHER_FILES_BYTES)
        total, done = 2 * plan.nbytes, 0

        def step(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None and done < total:
                progress(done, total)

        step(0)
        with destination.directory(path, nbytes) as work:
            written = _write(work, directory, plan, weight_format, shard_bytes, step)
            scratch = work / SCRATCH
            differences = compare(files.Weights(work), plan.tensors(scratch), change, step)
            if plan.extra:
                extra = SafetensorsFile(work / mtp_layers.FILE)
                compare(extra, plan.extra.items(), lambda *_: writer.TensorChange(), step)
            shutil.rmtree(scratch, ignore_errors=True)
            verified = Verified(None, None, plan.not_run)
            if not plan.not_run:
                with working("comparing what source and result compute"):
                    verified = verify(
                        directory,
                        work,
                        written.parameters,
                        differences,
                        compare_logits=compare_logits,
                        compare_text=compare_text,
                        shard_bytes=shard_bytes,
                    )
            results = [*sorted(work.glob("model*")), *sorted(work.glob(mtp_layers.FILE))]
            with working("computing the checksums of source and result"):
                config = filter(Path.is_file, [source / "config.json"])
                of_source = digests_of([*plan.paths, *config])
                of_result = digests_of([*results, work / "config.json"])
            report = ConversionReport(
                path=path,
                name=name,
                revision=commit,
                format=FORMAT_NAMES[plan.format],
                source=of_source,
                result=of_result,
                dtype=weight_format.describe(),
                written=written,
                tensor_report=plan.report,
                notes=(*plan.notes, *_notes(plan, weight_format, directory)),
                differences=differences,
                verified=verified,
                verdict=_verdict(verified, weight_format),
            )
            report.write(work)
        if progress is not None:
            progress(total, total)
    if upload_repo is not None:
        base_model = None if os.path.exists(local) else model
        upload(path, upload_repo, base_model=base_model, drafts=bool(plan.not_run))
    return report


def _write(
    work: Path,
    directory: Path,
    plan: Plan,
    weight_format: WeightFormat,
    shard_bytes: int,
    step: Callable[[int], None],
) -> writer.Written:
    written = writer.write_weights(
        work,
        plan.tensors(work / SCRATCH),
        plan.changes(weight_format.dtype),
        shard_bytes=shard_bytes,
        count=lambda name, tensor: plan.parameters(name),
        progress=step,
    )
    if plan.extra:
        writer.write_unchanged(work / mtp_layers.FILE, plan.extra, step)
    for file in files.tokenizer_files(directory):
        shutil.copyfile(file, work / file.name)
    names = {"dtype", "torch_dtype"} & plan.config.keys() if weight_format.dtype is not None else ()
    config = {**plan.config, **dict.fromkeys(names, weight_format.dtype)}
    writer.write_config(work, config, plan.quantization_entry(weight_format.quantization))
    return written


def _destination(model: str, local: Path, mlx_path: Path | None) -> Path:
    if mlx_path is not None:
        path = Path(mlx_path).expanduser()
        return path if path.name not in ("", "..") else path.resolve()
    name = local.resolve().name if os.path.exists(local) else model.rstrip("/").rpartition("/")[2]
    if os.path.isfile(local):
        name = Path(name).stem
    if not name.strip():
        name = resolve(model).name
    return Path("weights") / name


def _notes(plan: Plan, weight_format: WeightFormat, directory: Path) -> Iterator[str]:
    if weight_format.quantization is not None:
        matrices = (*plan.quantized, *(f"{path}.weight" for path in plan.stored))
        share = sum(map(plan.parameters, matrices)) / max(1, plan.total_parameters)
        if share < SHARE_TO_QUANTIZE:
            groups = (
                f"groups of {weight_format.quantization.group_size}, try a smaller --q-group-size"
            )
            remaining = f"the rows of the others do not divide into {groups}"
            yield f"quantized only {share:.0%} of the weights: {remaining}"
    # ByT5's tokenizer needs no files.
    alone = plan.config.get("tokenizer_class") == "ByT5Tokenizer"
    if not plan.not_run and not alone and not files.has_vocabulary(directory):
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
