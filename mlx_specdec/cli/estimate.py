"""The estimate command: what a pair takes and may gain, before it is downloaded."""

from __future__ import annotations

import sys

from ..core.options import mtp_of
from ..errors import OptionError
from ..system import show_size
from . import render
from .flags import Flags, Json, command, flag
from .loading import Sources

ESTIMATE_NOTE = (
    "These figures come from sizes and from the speed of matrices on this machine. Drafts of one "
    "family are mostly accepted at 60 to 80 %; mlx-specdec bench measures it with the real weights."
)


class PromptLength(Flags, panel="Prompt"):
    prompt_tokens: int = flag("The number of tokens of the prompt.", 128, min=1)


@command("mlx-specdec estimate --model Qwen/Qwen3-8B --draft-model auto --q-bits 4")
def estimate(sources: Sources, prompt: PromptLength, output: Json) -> None:
    """Predict what a pair takes and gains before a download.

    Only config.json and the headers of the weights are read."""
    model, draft_model = sources.named()
    if draft_model is None or mtp_of(draft_model) is not None:
        raise OptionError("name a draft model, or the directory of a drafter, with --draft-model")
    from ..measure.estimate import GENERATED
    from ..measure.estimate import estimate as predict
    from ..models.number_format import NumberFormat

    numbers = [
        NumberFormat(sources.dtype, q_bits, expand=sources.expand_weights)
        for q_bits in (sources.q_bits, sources.draft_q_bits)
    ]
    count = prompt.prompt_tokens
    found = predict((model, draft_model), sources.revision, numbers, count)
    target, fits = found["target"], found["fits"]
    if output.json:
        render.write(sys.stdout, render.as_json(found))
        return
    caches = f">caches of {count} + {GENERATED} tokens"
    sides = render.table("model", "numbers", ">weights", caches, ">read in a step")
    for one in (target, found["draft"]):
        sizes = (show_size(one[f"{part}_bytes"]) for part in ("weights", "caches", "step"))
        bits = f"{one['bits']}-bit, " if one["bits"] else ""
        sides.add_row(one["name"], f"{bits}{one['dtype']}", *sizes)
    need, limit = show_size(found["memory_bytes"]), show_size(found["memory_limit_bytes"])
    answer = "They fit." if fits else "They do NOT fit: take smaller models or fewer bits."
    lines = [sides, f"Both take {need}, and models may take {limit} here. {answer}"]
    if fits:
        table = render.table(">acceptance rate", ">draft length", ">speedup", ">tokens/s")
        form = "{acceptance_rate:.0%} {num_draft} {speed_up:.2f} {tokens_per_second:.1f}"
        for row in found["gains"]:
            table.add_row(*form.format(**row).split())
        lines += [table]
    lines += [f"The table of pairs: {found['known_gain']}."] if found["known_gain"] else []
    render.lay_out(sys.stdout, *lines, ESTIMATE_NOTE)
