"""Heavy work beside the event loop: a refusal comes back, and nothing of the body with it."""

from __future__ import annotations

import weakref

import pytest

from halfbyte.server.http.errors import ApiError, bad_request
from halfbyte.server.http.workroom import HUGE, SMALL, Workroom


class Body:
    pass


@pytest.mark.parametrize("size", [SMALL + 1, HUGE], ids=["large", "huge"])
async def test_a_refusal_that_is_kept_keeps_no_body(size: int) -> None:
    seen: list[weakref.ref[Body]] = []

    def work() -> None:
        body = Body()
        seen.append(weakref.ref(body))
        try:
            raise ValueError(body)
        except ValueError as e:
            raise bad_request("too many fields") from e

    room = Workroom()
    try:
        with pytest.raises(ApiError, match="too many fields") as kept:
            await room.run(size, work)
        assert kept.value.status == 400
        assert seen[0]() is None
    finally:
        room.close()


async def test_a_bug_keeps_its_traceback() -> None:
    def work() -> None:
        raise KeyError("a bug")

    room = Workroom()
    try:
        with pytest.raises(KeyError) as found:
            await room.run(HUGE, work)
        assert found.traceback[-1].name == "work"
    finally:
        room.close()
