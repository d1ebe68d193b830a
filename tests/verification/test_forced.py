import mlx.core as mx
import pytest

from mlx_specdec.interfaces import Proposal
from mlx_specdec.sampling.noise import CoupledNoise, SilentNoise
from mlx_specdec.verification.rules import ForcedAcceptance

from ..support.mocks import Guesser, TableContext, decoding, run

WIDTH = 7


def verdicts(probability: float, seed: int, rounds: int, size: int = 4) -> list[list[bool]]:
    rule = ForcedAcceptance(probability, seed)
    law = mx.random.normal((1, size + 1, WIDTH), key=mx.random.key(3))
    proposal = Proposal(mx.zeros((1, size), dtype=mx.int32))
    noise = SilentNoise().at(0, 0)
    return [rule.verify(law, proposal, noise).accepted[0].tolist() for _ in range(rounds)]


def test_each_token_stays_with_the_requested_probability_while_those_before_it_stay() -> None:
    accepted = verdicts(0.7, 0, 4000)
    assert all(row == sorted(row, reverse=True) for row in accepted)
    for place in range(4):
        share = sum(row[place] for row in accepted) / len(accepted)
        assert share == pytest.approx(0.7 ** (place + 1), abs=0.03)


def test_nothing_or_everything_stays_at_the_ends() -> None:
    assert all(row == [False] * 4 for row in verdicts(0.0, 1, 50))
    assert all(row == [True] * 4 for row in verdicts(1.0, 1, 50))


def test_the_seed_decides() -> None:
    assert verdicts(0.5, 1, 50) == verdicts(0.5, 1, 50) != verdicts(0.5, 2, 50)


@pytest.mark.parametrize("noise", [SilentNoise(), CoupledNoise(5, WIDTH)])
def test_what_follows_is_the_targets_own_choice_after_the_kept_tokens(noise) -> None:
    law = mx.random.normal((1, 4, WIDTH), key=mx.random.key(1))
    proposal = Proposal(mx.zeros((1, 3), dtype=mx.int32))
    gumbel = noise.at(0, 0).target(4)
    choices = mx.argmax(law if gumbel is None else law + gumbel, axis=-1)[0].tolist()
    rule = ForcedAcceptance(0.6, 0)
    seen = set()
    for _ in range(100):
        verdict = rule.verify(law, proposal, noise.at(0, 0))
        count = int(mx.sum(verdict.accepted).item())
        seen.add(count)
        assert verdict.next.tolist() == [choices[count]]
    assert seen == {0, 1, 2, 3}


def test_the_loop_keeps_its_books_under_a_forced_acceptance() -> None:
    context, guesser = TableContext(), Guesser(lambda position, limit: [3] * limit)
    loop = decoding(context, guesser, count=4, room=200, rule=ForcedAcceptance(0.6, 0))
    tokens, _, reason = run(loop)
    assert (len(tokens), reason) == (200, "length")
    accepted = sum(len(tokens) - 1 for tokens, _ in guesser.observed)
    assert tokens.count(3) >= accepted > 50
    assert context.lengths[0] <= 201


def test_a_plain_step_is_the_targets_own() -> None:
    law = mx.random.normal((1, 1, WIDTH), key=mx.random.key(1))
    nothing = Proposal(mx.zeros((1, 0), dtype=mx.int32))
    verdict = ForcedAcceptance(1.0, 0).verify(law, nothing, SilentNoise().at(0, 0))
    assert verdict.accepted.shape == (1, 0)
    assert verdict.next.tolist() == [mx.argmax(law[0, 0]).item()]
