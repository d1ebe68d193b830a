"""A cache in a directory: whole, of these very models and tokens, or computed anew."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine import prompt_cache
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache, Store
from mlx_specdec.engine.prompt_cache_files import Directory
from mlx_specdec.errors import OptionError
from mlx_specdec.models import base
from mlx_specdec.models.cache_settings import OWN_CACHES, CacheSettings
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.types import TARGET

from ..support import tiny
from ..support.pairs import PROMPT, ROOM, SYSTEM, model_of, pair_of, perturbed, run
from .test_prompt_cache import check, holds, keep, length, memory

DRAFTING = Options(max_tokens=6, num_draft=3, cost_cache=False)
TEXT = SYSTEM + PROMPT


def decoder(family: str, seed: int = 0, caches: CacheSettings = OWN_CACHES, **sizes: int) -> Pair:
    draft = DecoderOnlyModel(perturbed(tiny.build(family, seed, **sizes), 0.2))
    return pair_of(DecoderOnlyModel(tiny.build(family, seed, **sizes), caches=caches), draft)


def opened(directory: Path) -> PromptCache:
    models = {name: f"the {name} of this test" for name in ("target", "draft")}
    return PromptCache(ROOM, Directory(directory, 1 << 30, models))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "BLOCK_TOKENS", 8)


def damaged(content: bytes, how: str) -> bytes:
    at = len(content) - 9
    return {
        "empty": b"",
        "half": content[: len(content) // 2],
        "one byte less": content[:-1],
        "another bit": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
        "zeros": bytes(len(content)),
        "another header": content.replace(b'"tokens', b'"tokenz').replace(b"tokens", b"tokenz"),
        "longest header": b"\xff" * 40,
        "list": b"\x02\0\0\0\0\0\0\0[]",
    }[how]


HOW = ("half", "another bit", "another header")
ALL = (*HOW, "empty", "one byte less", "zeros", "longest header", "list")


@pytest.mark.parametrize(
    ("how", "when"),
    [*((how, "before the start") for how in ALL), *((how, "after the start") for how in HOW)],
)
def test_what_is_damaged_is_computed_anew(how: str, when: str, tmp_path: Path) -> None:
    pair = decoder("llama")
    cache = opened(tmp_path)
    plain = run(pair, TEXT, DRAFTING, cache)
    cache.close()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 4
    again = opened(tmp_path) if when == "after the start" else None
    for file in files:
        file.write_bytes(damaged(file.read_bytes(), how))
    again = again or opened(tmp_path)
    result = run(pair, TEXT, DRAFTING, again)
    again.close()
    assert (result.tokens, result.labels.cached_tokens) == (plain.tokens, 0)
    for _ in range(len(TEXT) // 8 + 1):  # each run finds the next damaged block
        third = opened(tmp_path)
        result = run(pair, TEXT, DRAFTING, third)
        third.close()
    assert (result.tokens, result.labels.cached_tokens) == (plain.tokens, len(TEXT) - 1)


def test_behind_a_block_that_is_gone_nothing_is_read(tmp_path: Path) -> None:
    pair = decoder("llama")
    cache = opened(tmp_path)
    plain = run(pair, TEXT, DRAFTING, cache)
    cache.close()
    for file in sorted(tmp_path.glob("*.safetensors")):
        rest = tmp_path / file.name
        content = rest.read_bytes()
        rest.unlink()
        again = opened(tmp_path)
        result = run(pair, TEXT, DRAFTING, again)
        again.close()
        assert result.tokens == plain.tokens
        rest.write_bytes(content)


def test_only_blocks_of_this_version_these_models_and_settings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, blocks = tiny.write("llama", tmp_path / "model"), tmp_path / "cache"

    def hits(pair: Pair) -> int:
        cache = Store(ROOM, blocks).open(pair)
        assert cache is not None
        found = run(pair, TEXT, DRAFTING, cache).labels.cached_tokens
        cache.close()
        return found

    def loaded(**changes: object) -> Pair:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **changes}))
        return pair_of(load_model(directory).model, None)

    most = len(TEXT) - 1
    assert [hits(loaded()), hits(loaded())] == [0, most]
    for changes in (
        {"rope_theta": 50.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 0.1},
    ):
        assert [hits(loaded(**changes)), hits(loaded())] == [0, most]
    monkeypatch.setattr(base, "__version__", "9.9")
    assert hits(loaded()) == 0


def sizes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@pytest.mark.parametrize("seed", range(8))
def test_within_their_bounds_memory_and_disk_never_mix_texts(seed: int, tmp_path: Path) -> None:
    """Texts of two tokens, which branch everywhere, with restarts in between."""
    chance = random.Random(seed)
    room, bound = chance.choice([500, 4000, 1 << 20]), chance.choice([9000, 60_000, 1 << 22])
    models = {name: f"the {name}" for name in ("target", "draft", "eagle3")}

    def start() -> PromptCache:
        return PromptCache(room, Directory(tmp_path, bound, models))

    cache = start()
    for step in range(60):
        text = [chance.randrange(2) for _ in range(chance.randrange(1, 24))]
        parts = {"target": memory(text)}
        if chance.random() < 0.7 and len(text) > 1:
            parts["eagle3"] = memory(text, lag=1)
        keep(cache, text, **parts)
        check(cache)
        if step % 15 == 14:
            cache.close()
            assert sizes(tmp_path) <= bound
            cache = start()
        prompt: Sequence[int] = [chance.randrange(2) for _ in range(chance.randrange(1, 24))]
        found = cache.find(prompt, len(prompt) - 1, chance.choice([(), ("eagle3",)]))
        if found:
            target = found.pop(TARGET)
            assert holds(target, prompt, target.length)
            for name, part in found.items():
                assert holds(part, prompt, part.length, lag=int(name == "eagle3"))
        check(cache)
    cache.close()


def test_the_oldest_goes_first_whatever_its_model_and_other_files_stay(tmp_path: Path) -> None:
    def start(model: str = "a digest") -> tuple[PromptCache, Directory]:
        directory = Directory(tmp_path, 1 << 20, {"target": model})
        return PromptCache(ROOM, directory), directory

    cache, _ = start("another")
    keep(cache, [9, 9], target=memory([9, 9]))
    cache.close()
    precious = tmp_path / "model.safetensors"
    mx.save_safetensors(str(precious), {"a": mx.zeros(3)})
    cache, directory = start()
    for text in ([1, 1], [2, 2], [3, 3]):
        keep(cache, text, target=memory(text))
    assert length(cache.find([1, 1, 1], 2)) == 2
    directory.max_bytes = directory.nbytes
    keep(cache, [4, 4], target=memory([4, 4]))
    cache.close()
    assert precious.exists()
    again, _ = start()
    assert [length(again.find([n, n, n], 2)) for n in (1, 2, 3, 4)] == [2, 0, 2, 2]
    again.close()
    other, _ = start("another")
    assert length(other.find([9, 9, 9], 2)) == 0
    other.close()


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_directories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory, pair in (
        (
            tmp_path / "file",
            pair_of(load_model(tiny.write("llama", tmp_path / "model")).model, None),
        ),
        (tmp_path, decoder("llama")),
        (tmp_path, pair_of(model_of("phi3small"), None)),
    ):
        with pytest.raises(OptionError, match="--prompt-cache-dir"):
            Store(ROOM, directory).open(pair)
