"""Whose request is read next: one in each pass of the event loop, first of the client whose last turn was longest ago.

Reading a request (parsing, rendering, tokenising) takes a few milliseconds of the one thread that serves everybody. A
hundred that arrive together would keep it from everything else until the last of them is read. In turns, a client that
asks seldom waits for one of them, and answers are written in between.
"""

from __future__ import annotations

import asyncio
from collections import deque

# So many turns ago a client that was never seen had its last one: new connections go first, but not for ever.
NEWCOMER = 256


class Turns:
    """`await take(client)` before a request is read. While nobody waits it returns at once."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last: dict[str, int] = {}  # turn of each client, of the last NEWCOMER turns, the oldest first
        self._ranks: dict[str, int] = {}  # of the clients that wait
        self._turn = 0
        self._pass_used = False  # a request is read in this pass

    async def take(self, client: str) -> None:
        loop = asyncio.get_running_loop()
        if not self._pass_used:
            self._pass_used = True
            self._count(client)
            loop.call_soon(self._next_pass, loop)
            return
        turn = loop.create_future()
        if client not in self._waiting:
            self._waiting[client] = deque()
            self._ranks[client] = self._last.get(client, self._turn - NEWCOMER)
        self._waiting[client].append(turn)
        await turn

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pass_used = self._give()
        if self._pass_used:
            loop.call_soon(self._next_pass, loop)

    def _give(self) -> bool:
        """Give the turn to a request; False if none waits."""
        while self._waiting:
            client = min(self._ranks, key=self._ranks.__getitem__)
            turns = self._waiting[client]
            turn = turns.popleft()
            if not turns:
                del self._waiting[client], self._ranks[client]
            if not turn.done():  # else its request was cancelled
                self._count(client)
                turn.set_result(None)
                return True
        return False

    def _count(self, client: str) -> None:
        self._turn += 1
        self._last.pop(client, None)
        self._last[client] = self._turn
        if client in self._ranks:
            self._ranks[client] = self._turn
        if len(self._last) > NEWCOMER:
            del self._last[next(iter(self._last))]
