"""Whether two tokenizers mean the same by the same ids. Compares content, not names or sizes."""

from __future__ import annotations

from ..errors import VocabularyError
from .tokenizer import Tokenizer


def common_size(target: Tokenizer, draft: Tokenizer, target_width: int, draft_width: int) -> int:
    """The size of the law that both models share: what target and its tokenizer both know.

    target_width, draft_width: columns of the two models' logits. Ids that only one side has, at
    the end, are padding and do no harm: they get no probability.
    Raises VocabularyError for one id with two meanings; it names the first.
    """
    ours = target.pieces()[:target_width]
    theirs = draft.pieces()[:draft_width]
    if ours[: len(theirs)] != theirs[: len(ours)]:
        pairs = enumerate(zip(ours, theirs, strict=False))
        for id, (mine, other) in pairs:
            if mine is not None and other is not None and mine != other:
                raise VocabularyError(
                    f"target and draft model have different tokenizers: token {id} is {mine!r} in "
                    f"the target and {other!r} in the draft; take a draft of the target's family"
                )
    return min(target_width, target.size)
