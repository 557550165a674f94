"""Whose request is read next: one in each pass of the event loop, clients in rotation.

Reading a request (parsing, rendering, tokenising) takes a few milliseconds of the one thread that serves everybody. A
hundred that arrive together would keep it from everything else until the last of them is read. In turns, another
client's request waits for one of each client that is ahead of it, and answers are written in between.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Turns:
    """`await take(client)` before a request is read. While nobody waits it returns at once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._taken = False  # the turn of this pass

    async def take(self, client: str) -> None:
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next_pass, loop)
            return
        turn = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = self._give()
        if self._taken:
            loop.call_soon(self._next_pass, loop)

    def _give(self) -> bool:
        """Gives the turn to the client that has waited longest for one; False if nobody waits."""
        while self._waiting:
            client, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                return True
        return False
