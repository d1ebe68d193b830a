"""Drafts from earlier texts: no text twice, and bounded memory."""

from mlx_specdec.proposers.lookup import PromptLookup, place_of
from mlx_specdec.proposers.text_index import History


def test_the_oldest_texts_go_first_and_memory_stays_at_its_bound() -> None:
    size = History(most=200)
    size.add("a", [], [1, 2])
    history = History(most=200, max_bytes=3 * size.nbytes)
    for tenant in range(5):
        for text in range(9):
            history.add(str(tenant), [], [1000 * tenant + 50 * text + k for k in range(40)])
        assert history.nbytes <= 3 * size.nbytes
    assert history.nbytes == 3 * size.nbytes
    assert [history.of(str(tenant)) is None for tenant in range(5)] == [True, True] + [False] * 3
    index = history.of("4")
    assert index is not None
    found = [index.find([4000 + 50 * text, 4001 + 50 * text], 1, 2).length for text in range(9)]
    assert found == [0] * 5 + [2] * 4


def test_a_conversation_is_stored_once() -> None:
    history, text = History(most=1100), [7]
    for turn in range(1, 10):
        prompt = [*text, *range(100 * turn, 100 * turn + 40)]
        text = [*prompt, *range(100 * turn + 40, 100 * turn + 80)]
        history.add("", prompt, text)
    index = history.of("")
    assert index is not None
    # What one turn goes on with follows what the one before it ended with.
    assert index.find([138, 139], 3, 2).following[0] == [140, 141, 142]
    assert index.find([178, 179], 3, 2).following == [[200, 201, 202], []]
    assert index.find([100, 101], 1, 2).following == [[102]]


def test_what_becomes_of_matches_is_learned_by_their_length() -> None:
    lookup = PromptLookup()
    before = [lookup.rates[place_of(length)] for length in (2, 4, 40)]
    assert before == sorted(before)
    for _ in range(200):
        lookup.learn(2, False)
        lookup.learn(50, True)
    after = [lookup.rates[place_of(length)] for length in (2, 4, 40)]
    assert after[0] < 0.05 and after[1] == before[1] and after[2] > 0.99
