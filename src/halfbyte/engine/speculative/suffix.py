"""Guess from what all requests have generated lately: a counted trie of recent output (the idea of SuffixDecoding).

The longest end of the sequence that the trie knows is followed along its most frequent continuation, for as long as
that continuation is the likely one. Agents that write the same tool calls and boilerplate again and again gain most.
Memory is bounded: when the trie is full it becomes the old one and a new one is begun; both are searched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.proposer import Proposal

if TYPE_CHECKING:
    from halfbyte.engine.sequence import Sequence


class _Node:
    __slots__ = ("count", "next")

    def __init__(self) -> None:
        self.count = 0
        self.next: dict[int, _Node] = {}


class SuffixProposer:
    def __init__(
        self, controller: Controller, *, depth: int = 16, shortest: int = 2, likely: float = 0.4, nodes: int = 400_000
    ) -> None:
        self.controller, self.depth, self.shortest, self.likely, self.nodes = controller, depth, shortest, likely, nodes
        self._young, self._old = _Node(), _Node()
        self._size = 0
        # Open ends of each sequence: the nodes reached by its last 1, 2, .. depth - 1 tokens.
        self._ends: dict[int, tuple[int, list[_Node]]] = {}

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        return [Proposal(self._guess(seq.tokens, most)) for seq, most in wants]

    def _guess(self, tokens: list[int], most: int) -> list[int]:
        for length in range(min(self.depth // 2, len(tokens)), self.shortest - 1, -1):
            end = tokens[-length:]
            node = _walk(self._young, end) or _walk(self._old, end)
            if node is not None and node.next:
                return self._follow(node, end, most)
        return []

    def _follow(self, node: _Node | None, path: list[int], most: int) -> list[int]:
        out: list[int] = []
        chance = 1.0
        while len(out) < most:
            if node is None or not node.next:  # deeper than the trie: start again from a shorter end
                path = (path + out)[-(self.depth // 2) :]
                node = _walk(self._young, path) or _walk(self._old, path)
                if node is None or not node.next:
                    break
            token, best = max(node.next.items(), key=_by_count)
            chance *= best.count / sum(n.count for n in node.next.values())
            if chance < self.likely:
                break
            out.append(token)
            node = best
        return out

    def observe(self, seq: Sequence, new: int) -> None:
        epoch, ends = self._ends.get(id(seq), (id(self._young), []))
        if epoch != id(self._young):
            ends = []
        for token in seq.tokens[-new:] if new else ():
            grown: list[_Node] = []
            for node in [self._young, *ends]:
                child = node.next.get(token)
                if child is None:
                    child = node.next[token] = _Node()
                    self._size += 1
                child.count += 1
                grown.append(child)
            ends = grown[: self.depth - 1]
        self._ends[id(seq)] = (id(self._young), ends)
        if self._size > self.nodes:
            self._old, self._young, self._size = self._young, _Node(), 0
            self._ends.clear()

    def forget(self, seq: Sequence) -> None:
        self._ends.pop(id(seq), None)

    def pace(self, seq: Sequence) -> Pace:
        return self.controller.pace()


def _walk(node: _Node, path: list[int]) -> _Node | None:
    for token in path:
        child = node.next.get(token)
        if child is None:
            return None
        node = child
    return node


def _by_count(item: tuple[int, _Node]) -> tuple[int, int]:
    return item[1].count, -item[0]
