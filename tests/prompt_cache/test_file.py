"""A cache on disk: whole, of these very weights, or not used at all."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.engine import prompt_cache_files as files
from mlx_specdec.engine import prompt_cache_files as stores
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.errors import OptionError, OutputError
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options

from ..support import tiny
from ..support.cached import ROOM, SYSTEM, known, run
from ..support.drafter_pairs import made
from ..support.families import model_of
from ..support.pairs import PROMPT, encoder_decoder, pair_of, perturbed

DRAFTING = Options(max_tokens=16, num_draft=3, cost_cache=False)
TEXT = SYSTEM + PROMPT


def llama(seed: int = 0, amount: float = 0.2, caches: CacheSettings | None = None) -> Pair:
    draft = DecoderOnlyModel(perturbed(tiny.build("llama", seed, head_dim=32), amount))
    return pair_of(DecoderOnlyModel(tiny.build("llama", seed, head_dim=32), caches=caches), draft)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return llama()


@pytest.fixture(scope="module")
def content(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of a file with two texts that begin alike."""
    file = tmp_path_factory.mktemp("written") / "cache"
    store = Store(ROOM, file)
    cache = store.open(pair)
    run(pair, TEXT, DRAFTING, cache)
    run(pair, [*SYSTEM, 1, 2], DRAFTING, cache)
    store.close(cache, pair)
    return file.read_bytes()


@pytest.fixture
def written(content: bytes, tmp_path: Path) -> Path:
    file = tmp_path / "cache of prompts"
    file.write_bytes(content)
    return file


SLOW = ("llama", "t5", "gemma3", "qwen3_next")


@pytest.mark.parametrize(
    "kind",
    [
        "llama, 8 bits",
        "llama, eagle3",
        "mamba2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW),
    ],
)
def test_what_was_written_is_read(kind: str, tmp_path: Path) -> None:
    make: dict[str, Callable[[], Pair]] = {
        "llama": llama,
        "llama, 8 bits": lambda: llama(caches=CacheSettings(8, 32)),
        "llama, eagle3": lambda: made("eagle3", "llama", tmp_path),
        "t5": lambda: encoder_decoder("own-head-scaled", 0.1),
    }
    for family in ("mamba2", "gemma3", "qwen3_next"):
        make[family] = lambda family=family: pair_of(
            DecoderOnlyModel(tiny.build(family)),
            DecoderOnlyModel(perturbed(tiny.build(family), 0.2)),
        )
    pair, store = make[kind](), Store(ROOM, tmp_path / "cache")
    cache = store.open(pair)
    before = [run(pair, prompt, DRAFTING, cache) for prompt in (TEXT, [*SYSTEM, 1, 2])]
    store.close(cache, pair)
    again = store.open(pair)
    assert (again.nbytes, len(list(again.nodes))) == (cache.nbytes, len(list(cache.nodes)))
    for prompt in (TEXT, [*SYSTEM, 1, 2]):
        for one, other in zip(known(cache, prompt), known(again, prompt), strict=True):
            assert one[:2] == other[:2] and all(map(mx.array_equal, one[2], other[2]))
    after = [run(pair, prompt, DRAFTING, again) for prompt in (TEXT, [*SYSTEM, 1, 2])]
    assert [each.tokens for each in after] == [each.tokens for each in before]
    assert all(each.labels.cached_tokens > 8 for each in after)


def test_a_file_of_other_weights_is_refused(written: Path) -> None:
    with pytest.raises(OptionError, match="made for another model"):
        Store(ROOM, written).open(llama(seed=1))


OTHER_ARITHMETIC = [
    {"rope_theta": 50.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rms_norm_eps": 0.1},
]


def changed(directory: Path, changes: dict) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("changes", OTHER_ARITHMETIC, ids=lambda changes: next(iter(changes)))
def test_a_file_is_refused_where_config_json_says_other_arithmetic(
    changes: dict, tmp_path: Path
) -> None:
    directory, file = tiny.write("llama", tmp_path / "model"), tmp_path / "cache"

    def loaded() -> Pair:
        return pair_of(load_model(directory).model, None)

    cache = Store(ROOM, file).open(loaded())
    run(loaded(), TEXT, DRAFTING, cache)
    Store(ROOM, file).close(cache, loaded())
    assert Store(ROOM, file).open(loaded()).find(TEXT, 8).cached_tokens == 8
    changed(directory, changes)
    with pytest.raises(OptionError, match=r"made for another model .* config\.json"):
        Store(ROOM, file).open(loaded())


def test_a_file_of_another_version_is_written_anew(
    pair: Pair, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "__version__", "9.9")
    store = Store(ROOM, written)
    with pytest.warns(RuntimeWarning, match="written anew"):
        cache = store.open(pair)
    assert cache.nbytes == 0
    store.close(cache, pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.open(pair).nbytes == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"],
)
def test_what_is_no_prompt_cache_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_bytes(content)
    with pytest.raises(OptionError, match="no prompt cache"):
        Store(ROOM, file)
    assert file.read_bytes() == content
    weights = tmp_path / "model.safetensors"
    mx.save_safetensors(str(weights), {"a": mx.zeros(3)})
    for strange in (weights, tmp_path):
        with pytest.raises(OptionError, match=r"no prompt cache|is no file"):
            Store(ROOM, strange)


@pytest.mark.parametrize("place", [0.5, 0.999])
def test_a_truncated_file_is_refused(place: float, pair: Pair, written: Path) -> None:
    data = written.read_bytes()
    written.write_bytes(data[: int(len(data) * place)])
    with pytest.raises(OptionError, match="is damaged"):
        Store(ROOM, written).open(pair)


def test_a_file_takes_its_place_whole_or_not_at_all(
    pair: Pair, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_bytes()
    store = Store(ROOM, written)
    cache = store.open(pair)
    store.close(cache, pair)
    assert written.read_bytes() == before, "nothing is new"
    run(pair, [9, 9, 9], DRAFTING, cache)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.mx, "save_safetensors", full)
    with pytest.raises(OutputError, match="No space left"):
        store.close(cache, pair)
    assert written.read_bytes() == before
    assert [each.name for each in written.parent.iterdir()] == [written.name]


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_no_file_is_written_for_a_model_whose_rows_disagree(tmp_path: Path) -> None:
    pair = pair_of(model_of("plamo3"), None)
    with pytest.raises(OptionError, match="nothing of a prompt can be kept"):
        Store(ROOM, tmp_path / "cache").open(pair)
