"""The flags that commands share, in groups. Imports no MLX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from ..cache_settings import CacheSettings
from ..errors import OptionError
from ..sampling.grammar import LONGEST
from ..training.config import DataConfig, DistillConfig, DrafterConfig, HeadsConfig
from .flags import REQUIRED, Flags, flag

COLLECTING, DISTILLING, FITTING = DataConfig(), DistillConfig(), HeadsConfig()
DRAFTING = DrafterConfig()
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
class Writers(Models):
    """A pair for whoever goes on with texts; without a name, the shipped one that writes Python."""

    model: str | None = flag(
        None, f"The target: a {MODEL}", "--model-name", show_default="the shipped Python model"
    )


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
class Json(Flags):
    """Output for programs."""

    panel = "Output"
    json: bool = flag(False, "Print one JSON object on standard output.")


@dataclass(frozen=True)
class TrainingTexts(Flags):
    """What a training learns from."""

    panel = "Data"
    data: Path = flag(
        REQUIRED,
        'A file with one text a line, or JSON lines with "prompt" and maybe "target".',
        metavar="FILE",
    )
    no_self_distill: bool = flag(False, "Learn from the data and not from the model's own text.")
    samples: int = flag(COLLECTING.samples, "The largest number of texts to learn from.")
    length: int = flag(COLLECTING.length, "The number of tokens of a text.")
    temperature: str = flag(
        ",".join(f"{each:g}" for each in COLLECTING.temperatures),
        "The temperatures at which the model writes, as many texts at each.",
        "--temp",
        metavar="NUMBER,...",
    )
    texts_at_once: int = flag(
        COLLECTING.texts_at_once, "The number of texts that the model writes in one pass."
    )

    def collecting(self, seed: int) -> DataConfig:
        """Raises OptionError."""
        return DataConfig(
            samples=self.samples,
            length=self.length,
            self_distill=not self.no_self_distill,
            temperatures=_numbers("temperature", self.temperature),
            seed=seed,
            texts_at_once=self.texts_at_once,
        )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise OptionError(
            f"{name} must be numbers with commas between them, not {text!a:.60}"
        ) from None


@dataclass(frozen=True)
class HeadSchedule(Flags):
    """How Medusa heads learn."""

    panel = "Training"
    batch: int = flag(FITTING.batch, "The number of hidden states in one step.")
    epochs: int = flag(FITTING.epochs, "The largest number of passes over the data.")
    learning_rate: float = flag(FITTING.learning_rate, "The highest learning rate.", "--lr")
    patience: int = flag(
        FITTING.patience, "The number of epochs without progress after which training ends."
    )
    seed: int = flag(FITTING.seed, "The seed of the data's order and of new weights.")


@dataclass(frozen=True)
class DraftSchedule(HeadSchedule):
    """How a draft model learns."""

    batch: int | None = flag(  # type: ignore[assignment]
        None,
        "The number of texts in one step.",
        show_default=f"{DISTILLING.batch}; dspark, eagle3 {DRAFTING.batch}",
    )
    learning_rate: float | None = flag(  # type: ignore[assignment]
        None,
        "The highest learning rate.",
        "--lr",
        show_default=f"{DISTILLING.learning_rate}; dspark, eagle3 {DRAFTING.learning_rate}",
    )

    def asked(self) -> dict[str, Any]:
        """What was asked for, by name; the rest is up to the kind."""
        return {name: value for name, value in vars(self).items() if value is not None}
