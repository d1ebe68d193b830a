"""The Protocols of models, proposers and rules, and the frozen results that pass between them.

Arrays have a leading batch axis. Python lists and tuples have one entry per sequence."""

from collections.abc import Callable

from .protocols import Context as Context
from .protocols import Model as Model
from .protocols import Noise as Noise
from .protocols import NoiseSource as NoiseSource
from .protocols import Proposer as Proposer
from .protocols import Rule as Rule
from .protocols import TargetModel as TargetModel
from .protocols import feed as feed
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
    """Ignore the progress of long work; the default `Progress`."""
