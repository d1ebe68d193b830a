"""Attention over quantized caches, a few query rows at a time: the same texts, less memory."""

import mlx.core as mx
import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm import attention
from mlx_specdec.models.mlx_lm.attention import attend_in_parts
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.pairs import PROMPT, drafts_change_no_text, pair_of, perturbed


def quantized(family: str, bits: int) -> DecoderOnlyModel:
    network = tiny.build(family, head_dim=32)
    return DecoderOnlyModel(network, caches=CacheSettings(bits, 32))


@pytest.mark.parametrize("masked", ["causal", "array", "array of each head", "one row", "none"])
@pytest.mark.parametrize("heads", [2, 4])
def test_rows_in_parts_are_those_of_one_call(
    masked: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, (rows, columns) = mx.random.key(0), (7, 20)
    queries = mx.random.normal((2, heads, rows, 32), key=key)
    packed = [mx.quantize(mx.random.normal((2, 2, columns, 32), key=key), 32, 8) for _ in "kv"]
    causal = mx.arange(columns) <= mx.arange(columns - rows, columns)[:, None]
    masks = {
        "causal": "causal",
        "array": causal,
        "array of each head": mx.where(mx.stack([mx.stack([causal])] * 2), 0.0, -1e9),
        "one row": (mx.arange(columns) < 9)[None, None, None],
        "none": None,
    }
    how = {"group_size": 32, "bits": 8}
    expected = attention._all_rows(queries * 1, *packed, 0.2, masks[masked], **how)
    calls: list[int] = []

    def counted(part: mx.array, *rest: object, **named: int) -> mx.array:
        calls.append(part.shape[2])
        return plain(part, *rest, **named)  # type: ignore[arg-type]

    plain = attention._all_rows
    monkeypatch.setattr(attention, "_all_rows", counted)
    monkeypatch.setattr(attention, "SCORES_NBYTES", 3 * 2 * heads * columns * 4 * 3)
    parts = attend_in_parts(queries * 1, *packed, 0.2, masks[masked], **how)
    assert calls == [3, 3, 1]
    assert mx.allclose(parts, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_texts_with_drafts_are_those_without(
    family: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rows a call at most: passes that verify are cut too.
    monkeypatch.setattr(attention, "SCORES_NBYTES", 3 * 4 * 20 * 4 * 2)
    target = quantized(family, bits)
    draft = DecoderOnlyModel(perturbed(tiny.build(family, head_dim=32), 0.3))
    pair = pair_of(target, draft)
    requests = [
        Request(prompt, Options(max_tokens=14, num_draft=3, temperature=heat, seed=3))
        for prompt, heat in ((PROMPT * 3, 0.0), (PROMPT[:1], 1.0), (PROMPT, 0.7))
    ]
    drafts_change_no_text(pair, requests)
