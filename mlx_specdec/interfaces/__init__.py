"""The Protocols of models, proposers and rules, and the frozen results that pass between them.

Models, proposers and rules import this package and never one another.

A batch is several sequences that go through one pass together. Arrays have a leading batch axis;
what differs between sequences and is known on the host comes as one entry per sequence. A single
sequence is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable

from .drafting import Noise as Noise
from .drafting import NoiseSource as NoiseSource
from .drafting import Prices as Prices
from .drafting import Proposer as Proposer
from .drafting import Rule as Rule
from .models import Context as Context
from .models import Model as Model
from .models import TargetModel as TargetModel
from .models import feed as feed
from .results import FINAL as FINAL
from .results import NO_TOKEN as NO_TOKEN
from .results import Proposal as Proposal
from .results import Scores as Scores
from .results import Verdict as Verdict
from .results import after as after
from .results import keys_of as keys_of
from .results import no_proposal as no_proposal
from .results import rectangle as rectangle
from .results import values_of as values_of

Progress = Callable[[int, int], None]
"""Called with (done, total) units of long work, first with done = 0 and last with done = total."""


def ignore_progress(done: int, total: int) -> None:
    """A Progress that does nothing."""
