"""Clients: whose sequences wait and run, what each client holds now and what each has had. Holds no tensors.

Two measures make the engine fair, one for each thing that clients compete for.

`served` counts the rows that were computed for a client (the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models"): prompts of the client that has had least are read first. Unused time is not saved up:
a client that comes with nothing waiting starts no lower than the least served client that is present. Leaving does not
help either: a count above that level is remembered.

`share` is the larger of a client's share of the slots and of the pages (its dominant share, Ghodsi et al.): the client
that holds least is admitted first, and where room is short the one that holds most yields. Pages that several sequences
use count for each of them.

A request without a client id belongs to the client "", so a program that runs its own engine is one client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.engine.sequence import Sequence
    from halfbyte.kv.pages import PagePool

MOST_ABSENT = 1024  # absent clients whose count is remembered
MOST_OVERTAKEN = 4  # admissions of other clients, after which the sequence that waits longest goes first


@dataclass(slots=True, eq=False)
class Client:
    id: str
    served: int = 0  # rows computed for it
    waiting: list[Sequence] = field(default_factory=list)  # by order
    running: list[Sequence] = field(default_factory=list)  # by order

    @property
    def pages(self) -> int:
        return sum(held_pages(seq) for seq in self.running)


class Clients:
    def __init__(self, pages: PagePool, slots: int) -> None:
        self._pool, self._slots = pages, slots
        self.present: dict[str, Client] = {}  # clients with a sequence that waits or runs
        self._oldest: Sequence | None = None  # of the clients that hold least, when they were last compared
        self._overtaken = 0  # admissions since it was the oldest that was admitted
        self._absent: dict[str, int] = {}  # rows that clients have had, the longest absent first

    def arrive(self, id: str) -> Client:
        """The client of a request that is about to be queued."""
        client = self.present.get(id)
        if client is None:
            client = Client(id, self._absent.pop(id, 0))
        if not client.waiting:
            client.served = max(client.served, self._least_served(client))
        self.present[id] = client
        return client

    def leave(self, client: Client) -> None:
        """Forget a client that has neither a waiting nor a running sequence."""
        assert not client.waiting
        assert not client.running
        del self.present[client.id]
        if not self.present:
            self._absent.clear()
        elif client.served > self._least_served(client):
            self._absent[client.id] = client.served
            if len(self._absent) > MOST_ABSENT:
                del self._absent[next(iter(self._absent))]

    def _least_served(self, apart_from: Client) -> int:
        return min((c.served for c in self.present.values() if c is not apart_from), default=0)

    # ---- slots and pages ----------------------------------------------------------------------

    def share(self, client: Client) -> float:
        return self._share(len(client.running), client.pages)

    def _share(self, slots: int, pages: int) -> float:
        return max(slots / self._slots, pages / self._pool.capacity)

    def in_turn(self) -> list[Client]:
        """Clients with waiting sequences, in the order in which they are admitted: who holds least goes first, of
        those that hold the same the one that will have had least when its prompt is read. One of them that was
        overtaken often enough goes first, so that no long prompt waits for ever."""
        waiting = [c for c in self.present.values() if c.waiting]
        if len(waiting) > 1:
            shares = {c.id: self.share(c) for c in waiting}
            waiting.sort(key=lambda c: (shares[c.id], c.served + len(c.waiting[0].tokens), c.waiting[0].order))
            least = shares[waiting[0].id]
            oldest = min((c for c in waiting if shares[c.id] == least), key=lambda c: c.waiting[0].order)
            self._oldest = oldest.waiting[0]
            if self._overtaken >= MOST_OVERTAKEN:
                waiting.remove(oldest)
                waiting.insert(0, oldest)
        return waiting

    def admitted(self, seq: Sequence) -> None:
        """Count the admissions that overtake the sequence which waits longest."""
        self._overtaken = 0 if self._oldest in (seq, None) else self._overtaken + 1

    def youngest_to_yield(self, running: list[Sequence]) -> Sequence:
        """The sequence that loses its pages when those that run need more than there are.

        It is the youngest of the client that holds most; clients with several sequences yield before another's only
        one. The oldest sequence of all never yields, so that some sequence always makes progress.
        """
        candidates = [c for c in self.present.values() if c.running and c.running[-1] is not running[0]]
        client = max(candidates, key=lambda c: (len(c.running) > 1, self.share(c), c.running[-1].order))
        return client.running[-1]

    def room_for(self, client: Client, need: int, lack: int, *, slot: bool) -> list[Sequence]:
        """The sequences that must yield so that `client` can be given `need` pages, `lack` of which are missing, and,
        where `slot` is true, a slot. Empty if too few of them belong to clients that would still hold as much."""
        after = self._share(len(client.running) + 1, client.pages + need)
        others = [_Holding(c) for c in self.present.values() if c is not client and len(c.running) > 1]
        out: list[Sequence] = []
        while slot or lack > 0:
            able = [h for h in others if h.slots > 1 and self._share(h.slots - 1, h.pages - h.next_pages) >= after]
            if not able:
                return []
            holding = max(able, key=lambda h: (self._share(h.slots, h.pages), h.next.order))
            seq = holding.next
            holding.slots -= 1
            holding.pages -= held_pages(seq)
            lack -= self._pool.releasable(seq.tables)
            slot = False
            out.append(seq)
        return out

    # ---- invariants ---------------------------------------------------------------------------

    def check(self, running: list[Sequence]) -> None:
        """Every invariant, from scratch."""
        for id, client in self.present.items():
            assert client.id == id
            assert client.waiting or client.running, "an absent client is counted as present"
            for seqs in (client.waiting, client.running):
                orders = [s.order for s in seqs]
                assert orders == sorted(orders)
                assert all(s.client is client for s in seqs)
        assert sorted(s.order for c in self.present.values() for s in c.running) == [s.order for s in running]
        assert not self._absent.keys() & self.present.keys()
        assert len(self._absent) <= MOST_ABSENT


class _Holding:
    """What a client would still hold after its youngest sequences have yielded."""

    __slots__ = ("client", "pages", "slots")

    def __init__(self, client: Client) -> None:
        self.client, self.slots, self.pages = client, len(client.running), client.pages

    @property
    def next(self) -> Sequence:
        return self.client.running[self.slots - 1]

    @property
    def next_pages(self) -> int:
        return held_pages(self.next)


def held_pages(seq: Sequence) -> int:
    tables = seq.tables
    return len(tables.full) + len(tables.sliding) - tables.first
