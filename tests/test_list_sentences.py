"""The sentences with lists of things that the shipped translator also learns from."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from demo_training import lists


def test_french_articles_agree_and_elide() -> None:
    nouns = {noun: number for _, noun, number in lists.NOUNS}
    said = [lists.with_article("some", noun, nouns[noun]) for noun in ("pain", "eau", "œufs")]
    assert said == ["du pain", "de l'eau", "des œufs"]
    said = [lists.with_article("of", noun, nouns[noun]) for noun in ("pain", "huile", "œufs")]
    assert said == ["de pain", "d'huile", "d'œufs"]
    assert lists.with_article("the", "haricots", nouns["haricots"]) == "les haricots"


def test_both_sides_are_whole_sentences() -> None:
    dice = random.Random(3)
    for _ in range(500):
        english, french = lists.list_sentence(dice)
        assert "{" not in english + french
        assert (english[-1] in ".?") and (french[-1] == english[-1] or french.endswith("plaît."))


def test_a_list_may_have_the_comma_before_and() -> None:
    members = ["eggs", "rice", "wine"]
    assert lists.listed(members, "and", serial=True) == "eggs, rice, and wine"
    assert lists.listed(members, "and", serial=False) == "eggs, rice and wine"
    assert lists.listed(members[:2], "and", serial=True) == "eggs and rice"
