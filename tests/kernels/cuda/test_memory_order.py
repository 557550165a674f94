"""Every order that a machine like the GPU's could put the mailboxes' words in, tried: none breaks a hand-over.

The machine: a thread issues its operations in order and need not wait for them; what is under way reaches L2, where
all of these words live, in any order, but for three rules. Operations on one word keep their order. A release reaches
L2 after everything its thread wrote before; a fence holds back all that follows until all before is there. An operation
that depends on a load (on its value, or by a branch on it) is issued when the load has returned: a GPU does not guess.
There is one copy of every word, so what one thread has seen nobody misses later (multi-copy atomicity).

PTX's own model has no such rule about dependencies: by it the pairs of decode/mailbox.cuh that release, and read
without acquire, race. `acquire` on the reader is the same as the dependency here: it costs an L1 invalidation in each
phase, and closes no order that this machine has. Each litmus is also run with a rule taken away, and then it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

Memory = dict[str, int]


@dataclass(frozen=True)
class Op:
    """One operation of a thread. `store` sets, `add` adds, `load` reads into a register, `wait` reads until the word
    has a value (a loop: what follows depends on it)."""

    kind: str
    word: str = ""
    value: int = 0
    after: tuple[int, ...] = ()  # earlier loads of this thread that it depends on
    release: bool = False


def store(word: str, value: int, *after: int) -> Op:
    return Op("store", word, value, after)


def add(word: str, value: int, *after: int, release: bool = False) -> Op:
    return Op("add", word, value, after, release)


def load(word: str, *after: int) -> Op:
    return Op("load", word, 0, after)


def wait(word: str, value: int, *after: int) -> Op:
    return Op("wait", word, value, after)


def fence() -> Op:
    return Op("fence")


def may_go(thread: list[Op], at: int, done: frozenset[int], *, dependencies: bool, releases: bool) -> bool:
    """Whether operation `at` may reach L2 now, when those in `done` have."""
    op = thread[at]
    for i in range(at):
        before = thread[i]
        if i in done:
            continue
        if before.word and before.word == op.word:
            return False
        if "fence" in (before.kind, op.kind):
            return False
        if releases and op.release and before.kind in ("store", "add"):
            return False
        if dependencies and i in op.after:
            return False
    return True


def outcomes(
    threads: list[list[Op]], start: Memory, *, dependencies: bool = True, releases: bool = True
) -> Iterator[tuple[Memory, dict[tuple[int, int], int]]]:
    """Memory and what every load returned, at the end of each order in which all threads end."""
    first = (tuple(sorted(start.items())), tuple(frozenset[int]() for _ in threads), ())
    seen, todo = {first}, [first]
    while todo:
        memory_items, done, read_items = todo.pop()
        if all(len(d) == len(t) for d, t in zip(done, threads)):
            yield dict(memory_items), dict(read_items)
            continue
        for t, thread in enumerate(threads):
            for at, op in enumerate(thread):
                if at in done[t] or not may_go(thread, at, done[t], dependencies=dependencies, releases=releases):
                    continue
                memory = dict(memory_items)
                reads = read_items
                if op.kind == "store":
                    memory[op.word] = op.value
                elif op.kind == "add":
                    memory[op.word] += op.value
                elif op.kind == "load" or (op.kind == "wait" and memory[op.word] == op.value):
                    reads = tuple(sorted((*read_items, ((t, at), memory[op.word]))))
                elif op.kind == "wait":
                    continue  # it looks again
                state = (
                    tuple(sorted(memory.items())),
                    tuple(d | {at} if i == t else d for i, d in enumerate(done)),
                    reads,
                )
                if state not in seen:
                    seen.add(state)
                    todo.append(state)


Litmus = tuple[list[list[Op]], Memory, Callable[[Memory, dict[tuple[int, int], int]], bool]]


def cleared_before_added() -> Litmus:
    """mailbox.cuh, 3: pass_on clears a sum of the layer after (mid) and adds to x with release; whoever finds x whole
    adds to what was cleared. The old sum is 5; the new one must be what was added."""
    clears = [store("mid", 0), add("x", 1, release=True)]
    others = [add("x", 1, release=True)]  # x is whole with all contributions
    adds = [wait("x", 2), add("mid", 7, 0)]
    return [clears, others, adds], {"mid": 5, "x": 0}, lambda m, _: m["mid"] == 7


def two_hops() -> Litmus:
    """The same through a block that has no tile of qkv: it sees x through a word of qkv (a tag), whose writer saw x."""
    clears = [store("mid", 0), add("x", 1, release=True)]
    writes_qkv = [wait("x", 1), store("qkv", 1, 0)]
    adds = [wait("qkv", 1), add("mid", 7, 0)]
    return [clears, writes_qkv, adds], {"mid": 5, "x": 0, "qkv": 0}, lambda m, _: m["mid"] == 7


def overwritten_after_read() -> Litmus:
    """mailbox.cuh, 5: words with a tag are overwritten by the next layer. Its writer knows x, which needs what the
    reader of the old word adds after it has read."""
    reads = [wait("qkv", 1), load("qkv", 0), add("x", 1, 0, 1)]
    overwrites = [wait("x", 1), store("qkv", 2, 0)]
    writes = [store("qkv", 1)]
    return [writes, reads, overwrites], {"qkv": 0, "x": 0}, lambda _, r: r[1, 1] == 1


def broken_rows_reach_the_head() -> Litmus:
    """A value that is no number: its word is written, then a fence, then what others wait for; the head reads the word
    when it has seen x whole."""
    breaks = [add("broken", 1), fence(), store("h", 1)]
    down = [wait("h", 1), add("x", 1, 0)]
    head = [wait("x", 1), load("broken", 0)]
    return [breaks, down, head], {"broken": 0, "h": 0, "x": 0}, lambda _, r: r[2, 1] == 1


def stored_before_counted() -> Litmus:
    """product.cu's `done`, attention's arrivals and the sampler's tickets: data, then a count with release; whoever
    sees the count reads the data."""
    stores = [store("data", 9), add("done", 1, release=True)]
    reads = [wait("done", 1), load("data", 0)]
    return [stores, reads], {"data": 0, "done": 0}, lambda _, r: r[1, 1] == 9


LITMUS = [cleared_before_added, two_hops, overwritten_after_read, broken_rows_reach_the_head, stored_before_counted]


@pytest.mark.parametrize("litmus", LITMUS)
def test_no_order_breaks_a_hand_over(litmus: Callable[[], Litmus]) -> None:
    threads, start, right = litmus()
    ends = list(outcomes(threads, start))
    assert ends, "the threads end"
    assert all(right(*end) for end in ends)


@pytest.mark.parametrize("litmus", LITMUS)
def test_without_dependencies_it_would_break(litmus: Callable[[], Litmus]) -> None:
    """So the check can fail, and the rule is what the kernels rely on."""
    threads, start, right = litmus()
    assert not all(right(*end) for end in outcomes(threads, start, dependencies=False))


@pytest.mark.parametrize("litmus", [cleared_before_added, two_hops, stored_before_counted])
def test_without_the_release_it_would_break(litmus: Callable[[], Litmus]) -> None:
    threads, start, right = litmus()
    assert not all(right(*end) for end in outcomes(threads, start, releases=False))


def test_without_the_fence_a_broken_row_could_pass() -> None:
    threads, start, right = broken_rows_reach_the_head()
    threads[0] = [op for op in threads[0] if op.kind != "fence"]
    assert not all(right(*end) for end in outcomes(threads, start))
