"""A pair of models that completions share: a target, its tokenizer, and its drafters."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..core.constraint import Alphabet, Constraint
from ..core.options import Options
from ..core.worth import Memory
from ..errors import OptionError
from ..models.base import Base
from ..models.drafters.medusa import MedusaHeads
from ..models.drafters.network import DrafterNetwork
from ..models.encoder_decoder.family import Languages
from ..proposers.text_index import BETWEEN, DEPTH, History, TextIndex
from ..text import prompts as documents
from ..text.tokenizer import Tokenizer
from ..text.vocabulary import Translation, written_texts
from ..types import Progress


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, and its drafters. `load` creates it, and many completions share it.

    Attributes:
        name, draft_name: The names that `load` was called with.
        target, draft: The models; `draft` is None without a draft model.
        tokenizer: The target's tokenizer.
        eos_token_ids: The ids of the tokens that end a completion.
        vocabulary: The number of token ids that target and tokenizer have in common. Every
            distribution has this width.
        dtype: The dtype of the target's weights in words, such as "4-bit, bfloat16".
        load_seconds: The time in seconds that loading took, without downloads.
        translation: The map of shared tokens to a draft model with another vocabulary.
        documents, history: The texts that n-gram lookup searches. Completions are added to
            `history`.
        heads: The Medusa heads of the target.
        drafter_network: The hidden-state drafter that takes the place of a draft model.
        unusable: The drafters in the target's checkpoint that cannot be used, and why.
        draft_bytes: The memory that drafters take in addition to the target.
        task_prefix: The text that every prompt has to begin with, or "".
        languages: The languages of a target that translates.
        notes: Lines for the user about the way in which the weights are used.
        judged: The drafters of which it is known whether they fit the target at all.
        learned: The acceptance rates and costs from which draft lengths are chosen.
        sampling: The settings of `Options` that generation_config.json recommends, if any.
    """

    name: str
    draft_name: str | None
    target: Base
    draft: Base | None
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocabulary: int
    dtype: str
    load_seconds: float
    translation: Translation | None = None
    documents: TextIndex | None = None
    history: History | None = field(default=None, compare=False, repr=False)
    heads: MedusaHeads | None = None
    drafter_network: DrafterNetwork | None = None
    unusable: Mapping[str, str] = field(default_factory=dict, compare=False)
    draft_bytes: int = 0
    task_prefix: str = ""
    languages: Languages | None = None
    notes: tuple[str, ...] = ()
    judged: set[str] = field(default_factory=set, compare=False, repr=False)
    learned: Memory = field(default_factory=Memory, compare=False, repr=False)
    sampling: Mapping[str, float] = field(default_factory=dict)

    def reaching(self, length: int) -> "Pair":
        """Return the pair with its models for sequences of at most `length` tokens; see
        `base.Base.reaching`."""
        target = self.target.reaching(length)
        draft = None if self.draft is None else self.draft.reaching(length)
        if target is self.target and draft is self.draft:
            return self
        return replace(self, target=target, draft=draft)

    def constraint(self, options: Options, *, open_end: bool = False) -> Constraint | None:
        """Return the constraint of a new completion, or None without a grammar. A bias of -inf bans
        a token. open_end: See `Constraint`.

        Raises:
            OptionError: The model has no completion that satisfies the grammar.
        """
        if (grammar := options.constraint) is None:
            return None
        ends = [id for id in self.eos_token_ids if id < self.vocabulary]
        if not ends:
            raise OptionError(
                "json-schema, regex and grammar need a token that ends a text, and the model has "
                "none: name one with extra-eos-token"
            )
        banned = [id for id, value in options.logit_bias.items() if value == -math.inf]
        alphabet = alphabet_of(self.tokenizer, self.vocabulary)
        return alphabet.constraint(grammar, ends, banned, open_end=open_end)


@functools.lru_cache(maxsize=2)
def alphabet_of(tokenizer: Tokenizer, vocabulary: int) -> Alphabet:
    """Return the strings that each token writes, for constraints. This takes up to a second."""
    texts = written_texts(tokenizer)[:vocabulary]
    words = (id for id, text in enumerate(texts) if text and len(text) > 1 and text[:1] == b" ")
    first = next((id for id in words if id not in tokenizer.special_ids), None)
    spaced = first is not None and not tokenizer.decode([first]).startswith(" ")
    return Alphabet(texts, tokenizer.special_ids, tokenizer.encode, spaced=spaced)


def with_history(pair: Pair, texts: Iterable[Sequence[int]] = ()) -> Pair:
    """Return the pair with a history: n-gram lookup then also searches the completions that it
    generates from now on. texts: The token ids of earlier texts to search, the oldest first."""
    history = History()
    for text in texts:
        history.add("", text, text)
    return replace(pair, history=history)


def with_documents(pair: Pair, files: Sequence[Path], progress: Progress) -> Pair:
    """Return the pair with documents, which n-gram lookup then searches, too.

    Args:
        files: UTF-8 texts. Their index is held in memory, about 25 bytes per token.
        progress: Called with the numbers of characters that are read and that there are.
    Raises:
        DocumentError: A file is missing, empty, too large, or not text.
    """
    texts = documents.tokens(files, pair.tokenizer, progress)
    tokens = np.concatenate([np.append(text, BETWEEN) for text in texts])
    index = TextIndex(DEPTH + len(tokens))
    index.add(np.where(tokens < pair.vocabulary, tokens, BETWEEN))
    return replace(pair, documents=index)
