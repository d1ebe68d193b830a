"""The flags that commands share, in groups. Imports no MLX."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.disk import parse
from ..errors import OptionError
from ..models.cache_settings import CacheSettings
from ..sampling.grammar import LONGEST
from .flags import REQUIRED, Flags, flag

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
MODEL = "directory or a name on the Hugging Face Hub."
REVISION = "The branch, tag or commit of the model on the Hub."
DTYPE = "The number format to compute in."
MAX_TOKENS = "The largest number of tokens to generate."
TEMPERATURE = "The sampling temperature; 0 is greedy."


@dataclass(frozen=True)
class Model(Flags):
    """One model, which a command cannot do without."""

    panel = "Model"
    model: str = flag(REQUIRED, f"The model: a {MODEL}", "--model-name")
    dtype: Dtype = flag("auto", DTYPE)


@dataclass(frozen=True)
class Sources(Flags):
    """A target and a draft model by name, and what they compute in."""

    panel = "Model"
    model: str | None = flag(
        None, f"The target: a {MODEL}", "--model-name", show_default="the shipped translator"
    )
    draft_model: str | None = flag(
        None,
        "The draft, a model or a drafter on hidden states: a directory, a name on the Hub, self "
        "for the target at fewer bits, or auto for the one in the table of pairs.",
        "--draft-model-name",
    )
    revision: str | None = flag(None, REVISION)
    dtype: Dtype = flag("auto", DTYPE)
    q_bits: int | None = flag(None, "Quantize the target to this many bits on load.")
    draft_q_bits: int | None = flag(
        None, "Quantize the draft to this many bits on load.", "--draft-bits"
    )


@dataclass(frozen=True)
class Models(Sources):
    """A pair that is loaded."""

    adapter_path: Path | None = flag(
        None, "An adapter for the target: a directory that mlx-lm has trained.", metavar="DIR"
    )
    draft_vocab: Literal["same", "intersect"] = flag(
        "same", "With intersect, a draft of another vocabulary drafts what both models can write."
    )

    expand_weights: bool | None = flag(
        None,
        "Compute with whole weights where a model's are quantized.",
        show_default="on a CPU, up to a quarter of the memory for each model",
    )
    distributed: Literal["tensor", "pipeline"] | None = flag(
        None,
        "Share the target between the machines that mlx-specdec launch or mlx.launch has started: "
        "a part of each layer (tensor), or some of the layers (pipeline).",
    )
    status_file: Path | None = flag(
        None,
        "With --distributed, a file for the exit code, which mlx.launch does not tell.",
        metavar="FILE",
    )

    def loading(self) -> dict[str, Any]:
        """The arguments of `assemble.load` beside the two names."""
        others = ("model", "draft_model", "status_file")
        return {k: v for k, v in vars(self).items() if k not in others}

    def begin(self, groups: Mapping[str, Flags]) -> None:
        """Meet the other ranks; all but rank 0 end here when rank 0 does."""
        if self.distributed is None:
            if self.status_file is not None:
                raise OptionError("status-file is for distributed: leave it out")
            return
        from .pairs import meet

        caches = [each.settings() for each in groups.values() if isinstance(each, KVCache)]
        meet(self, caches[0] if caches else None)


@dataclass(frozen=True)
class KVCache(Flags):
    """What decoder-only models keep of earlier tokens."""

    panel = "Model"
    kv_bits: int | None = flag(None, "Quantize the KV cache to 2, 3, 4, 6 or 8 bits.")
    kv_group_size: int = flag(64, "The number of values in the KV cache that share one scale.")
    max_kv_size: int | None = flag(None, "Keep only this many of the newest tokens.")

    def settings(self) -> CacheSettings:
        """Raises OptionError."""
        return CacheSettings(self.kv_bits, self.kv_group_size, self.max_kv_size)


@dataclass(frozen=True)
class Memory(Flags):
    """The memory for texts that are decoded together."""

    panel = "Model"
    memory_budget: str | None = flag(
        None,
        "The memory that all texts together may take beside the models, such as 8GB; what does not "
        "fit waits.",
        metavar="SIZE",
        show_default="what the machine has left",
    )

    def size(self) -> int | None:
        """Return the budget in bytes, None for the default. Raises OptionError."""
        nbytes = None if self.memory_budget is None else parse(self.memory_budget)
        if nbytes == 0:
            raise OptionError("--memory-budget must be more than 0: give a size such as 8GB")
        return nbytes


@dataclass(frozen=True)
class ChatTemplate(Flags):
    """How a prompt is read."""

    panel = "Prompt"
    no_chat_template: bool = flag(
        False, "Use no chat template; take the prompt as it is.", "--ignore-chat-template"
    )
    system_prompt: str | None = flag(
        None, "The system's message, which the chat template puts before the prompt."
    )
    chat_template_config: str | None = flag(
        None,
        "Variables for the chat template, for example '{\"enable_thinking\": false}'.",
        metavar="JSON",
    )
    prefill_step_size: int | None = flag(
        None,
        "The number of tokens of the prompt in one pass.",
        show_default="512; 2048 on an accelerator with room",
    )

    def for_options(self) -> dict[str, Any]:
        return {
            **super().for_options(),
            "chat_template": not self.no_chat_template,
            "chat_template_config": _json_object(self.chat_template_config),
        }


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        told = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise OptionError(
            f'--chat-template-config must be a JSON object, for example {{"key": true}}, not '
            f"{text!r:.80}"
        )
    return told


@dataclass(frozen=True)
class CostCache(Flags):
    """What --num-draft auto begins with."""

    panel = "Drafting"
    no_cache: bool = flag(False, "Neither use nor keep the costs of rounds on this machine.")

    def for_options(self) -> dict[str, Any]:
        return {"cost_cache": not self.no_cache}


@dataclass(frozen=True)
class Rule(Flags):
    """How drafts are verified."""

    panel = "Verification"
    rule: Literal["coupled", "token", "block", "typical"] | None = flag(
        None,
        "The rule by which draft tokens are accepted: coupled writes the same text as plain "
        "decoding, token and block keep its distribution, typical is lossy.",
        show_default="coupled",
    )


@dataclass(frozen=True)
class Verification(Rule):
    """How drafts are verified, or are said to be."""

    simulate_acceptance: float | None = flag(
        None,
        "Measure decoding as if each draft token were accepted with this probability. No text is "
        "printed, and missing weights are random.",
    )

    def for_options(self) -> dict[str, Any]:
        return {**super().for_options(), "simulated_acceptance": self.simulate_acceptance}


@dataclass(frozen=True)
class Lenience(Flags):
    """Settings of lossy verification."""

    panel = "Verification"
    delta: float = flag(0.0, "The lenience from 0 to 1; the text is lossy above 0.")
    posterior_threshold: float = flag(0.09, "The probability above which typical always accepts.")
    posterior_alpha: float = flag(0.3, "The factor of exp(-entropy) in the threshold of typical.")


@dataclass(frozen=True)
class Sampling(Flags):
    """The distribution that tokens are drawn from."""

    panel = "Sampling"
    max_tokens: int = flag(100, MAX_TOKENS, "-m")
    seed: int = flag(0, "The seed that decides the text above temperature 0.")
    temperature: float = flag(0.0, TEMPERATURE, "--temp")
    top_p: float = flag(1.0, "The total probability of the tokens to keep; 1 keeps all.")
    top_k: int = flag(0, "The number of likeliest tokens to keep; 0 keeps all.")
    min_p: float = flag(0.0, "The least share of the likeliest token's probability; 0 keeps all.")


@dataclass(frozen=True)
class Json(Flags):
    """Output for programs."""

    panel = "Output"
    json: bool = flag(False, "Print one JSON object on standard output.")


@dataclass(frozen=True)
class Constraints(Flags):
    """What the text has to look like."""

    panel = "Constraints"
    json_schema: Path | None = flag(
        None, "A file with the JSON schema that the text has to fit.", metavar="FILE"
    )
    regex: str | None = flag(None, "The regular expression that the whole text has to match.")
    grammar: Path | None = flag(
        None,
        "A file with the grammar that the text has to follow, in llguidance's variant of Lark.",
        metavar="FILE",
    )

    def for_options(self) -> dict[str, Any]:
        return {
            "json_schema": _contents("--json-schema", self.json_schema),
            "regex": self.regex,
            "grammar": _contents("--grammar", self.grammar),
        }

    def digests(self) -> dict[str, str | None]:
        """What stands for each in settings that are compared."""
        told = self.for_options().items()
        return {name: text and sha256(text.encode()).hexdigest() for name, text in told}


def _contents(name: str, file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        with file.open(encoding="utf-8-sig") as stream:
            return stream.read(LONGEST + 1)
    except OSError as problem:
        raise OptionError(f"{name}: cannot read {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{name}: {file} is not UTF-8 text") from None


@dataclass(frozen=True)
class Penalties(Flags):
    """What changes the chances of single tokens, and what ends the text."""

    panel = "Sampling"
    xtc_probability: float = flag(
        0.0, "The share of positions whose top choices are excluded; 0 excludes none."
    )
    xtc_threshold: float = flag(
        0.1, "The probability above which all tokens but the least likely one are top choices."
    )
    repetition_penalty: float = flag(1.0, "The factor against earlier tokens; 1 is off.")
    presence_penalty: float = flag(0.0, "The amount subtracted from the logit of earlier tokens.")
    frequency_penalty: float = flag(0.0, "The amount subtracted for each time a token occurred.")
    logit_bias: list[str] | None = flag(
        None,
        "A value to add to the logit of one token id; the flag may be repeated.",
        metavar="ID=VALUE",
    )
    stop: list[str] | None = flag(
        None, "A string before which the text ends; the flag may be repeated."
    )
    extra_eos_token: list[str] | None = flag(
        None, "A token, or its id, that ends the text as well; the flag may be repeated."
    )

    def for_options(self) -> dict[str, Any]:
        return {
            **super().for_options(),
            "logit_bias": _biases(self.logit_bias or ()),
            "stop": tuple(self.stop or ()),
            "extra_eos_token": tuple(self.extra_eos_token or ()),
        }


def _biases(items: Sequence[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                f"--logit-bias must look like ID=VALUE, for example 42=-5, not {item!r}"
            ) from None
    return biases
