"""Parts of an answer on their way from the engine to one client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from mlx_specdec.decoding.stop_criteria import Emission
from mlx_specdec.engine.request import Part
from mlx_specdec.serve.service import ResponseStream


def test_what_comes_behind_the_close_is_dropped() -> None:
    cancelled: list[int] = []
    engine: Any = SimpleNamespace(
        submit=lambda requests, hear: [7, 8], cancel=lambda numbers: cancelled.extend(numbers)
    )

    async def talk_and_leave() -> list[object]:
        parsed: Any = SimpleNamespace(requests=[None, None], reader=object)
        stream = ResponseStream(engine, parsed, Any, 60.0)

        async def listen() -> list[object]:
            return [each async for each in stream._steps()]

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        stream._hear(Part(7, Emission((), ())))
        stream.close()
        return await listening

    assert asyncio.run(talk_and_leave()) == []
    assert cancelled == [7, 8]
