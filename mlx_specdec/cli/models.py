"""The command that lists the models on this machine's disk, and removes one of them."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Literal

from ..checkpoints import stored_models as stored
from ..errors import CheckpointError, OptionError
from ..system import show_size
from . import render
from .flags import Flags, command, flag


class ModelsFlags(Flags, panel="Models"):
    action: Literal["list", "remove"] = flag(
        "List the models, or remove one.", "list", argument=True, metavar="[remove]"
    )
    name: str | None = flag(
        "The name of the model to remove.",
        argument=True,
        metavar="[NAME]",
        autocompletion=stored.names,
    )


@command("mlx-specdec models", "mlx-specdec models remove mlx-community/Qwen3-8B-4bit")
def models(flags: ModelsFlags) -> None:
    """List the models on this disk, or remove one.

    These are the models in the Hub's cache, those of LM Studio and ollama, those that
    scripts/real_models.sh has downloaded, and those in weights/. Only models of the Hub's cache and
    of the script can be removed. You are asked first."""
    if flags.action == "remove":
        _remove(flags.name)
    elif flags.name is not None:
        raise OptionError(
            "to list models takes no name: mlx-specdec models remove NAME removes one"
        )
    else:
        _list()


def _list() -> None:
    from ..models.loading import why_not

    found = stored.stored_models()
    table = render.table("model", ">size", "type", "last used", "runs here")
    for one in found:
        used = time.strftime("%Y-%m-%d", time.localtime(one.used)) if one.used else ""
        kind = _drafter(one)
        problem = one.problem or ("" if kind else why_not(one.directory))
        cells = [one.name, show_size(one.nbytes), kind or one.type, used, problem or "yes"]
        table.add_row(*map(render.escaped, cells))
    total = sum(one.nbytes for one in found if one.in_hub)
    if found:
        render.lay_out(sys.stdout, table, wrap=False)
    render.lay_out(
        sys.stdout,
        f"The Hub's cache {stored.hub_cache()} has {show_size(total)} of models. "
        "mlx-specdec models remove NAME removes one.",
    )


def _drafter(one: stored.StoredModel) -> str:
    """Return the kind of a drafter, or "" for a whole model."""
    from ..models.drafters import kinds, medusa

    with suppress(CheckpointError):  # loading reports what is damaged
        if medusa.is_medusa(one.directory):
            return "Medusa heads"
        if kind := kinds.kind_of(one.directory):
            return f"{kind} drafter"
    return ""


def _remove(name: str | None) -> None:
    if name is None:
        raise OptionError("name the model to remove: mlx-specdec models lists all of them")
    if name.startswith(stored.SHIPPED):
        raise OptionError(f"{name} came with the program: remove its directory yourself")
    if name.startswith(stored.OTHER_PROGRAMS):
        raise OptionError(f"{name} belongs to another program: remove it there")
    size = next((show_size(one.nbytes) for one in stored.stored_models() if one.name == name), "")
    if size:
        print(f"Remove {name} ({size}) from the disk? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            render.tell("nothing was removed")
            return
    render.tell(f"removed {name}: {show_size(stored.remove(name))} are free")
