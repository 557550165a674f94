"""Pages of the KV cache: who holds which, what may be reused, what is given back. Holds no tensors.

gpt-oss has as many sliding-window layers as full ones, all of equal shape, so a page is `page_size` tokens of all
layers of one kind. One pool of page numbers serves both kinds; a sequence has a block table for each. Page 0 is
scratch and is never handed out.

A prefix hit at length n needs every full page before n and, of the sliding kind, only the pages that a query at n
can see. Those windows are kept where a next request is likely to continue: at the end of a prompt, where a sequence
ended, and where two prompts were seen to part. All other sliding pages are forgotten once the window has passed them;
nothing here can bring such a page back, because its hash is dropped before its number is free again.

Hashes are chained over whole pages (the idea of vLLM's prefix cache), 128 bits of BLAKE2b, so equal hash means equal
prefix. A hash is registered only when the tokens of its page are committed: a page that a failed step half wrote is
never found.

Pages can outlive the pool in a store of the caller's. `on_end` receives the pages of a prompt when it is computed, and
of a sequence when it gives its pages back; code that copies one checks with `unchanged`, afterwards, that it was not
handed out meanwhile. `reach` and `absent` say what a store could add to a hit, and `insert`
makes room for it.

`on_full` receives the pages of both kinds that a sequence has just filled, before the window gives any back.

Refuses to schedule: a caller asks (`available`, `cost`) and then acts (`extend`), and decides who must yield.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

FULL, SLIDING = 0, 1
SCRATCH = 0
End = Literal["prompt", "sequence", "preempted"]  # what has ended: a prompt was computed, or pages are given back


@dataclass(frozen=True, slots=True)
class Hit:
    """A usable prefix: `blocks` whole pages; `full_blocks` is how far the full kind alone would have reached."""

    blocks: int = 0
    full_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PageRef:
    """A findable page, as long as it is `unchanged`."""

    kind: int
    hash: bytes
    page: int
    generation: int


@dataclass(frozen=True)
class PageStats:
    total: int  # pages that can be handed out
    used: int  # held by a sequence
    cached: int  # not held by a sequence, findable by hash
    peak_used: int
    hit_tokens: int
    query_tokens: int
    evicted: int


@dataclass(slots=True, eq=False)
class Tables:
    """One sequence's pages. Outlives preemption: `hashes` stays true as long as the tokens do."""

    salt: bytes = b""
    full: list[int] = field(default_factory=list)
    sliding: list[int] = field(default_factory=list)
    first: int = 0  # sliding blocks before this one are given back (or were never needed) and read SCRATCH
    length: int = 0  # tokens whose keys and values are committed
    prompt: int = 0  # tokens that were to be computed when it was attached
    hashes: list[bytes] = field(default_factory=list)
    keep: set[int] = field(default_factory=set)  # sliding blocks to keep findable when the window has passed
    attached: bool = False
    # Tokens computed as a prompt, where those behind have other bits: a page with one of them is found only by a
    # sequence with this boundary. None: a page's bits depend on its tokens alone.
    boundary: int | None = None


class PagePool:
    def __init__(self, pages: int, page_size: int, window: int, *, prefix_cache: bool = True) -> None:
        assert pages >= 2, "page 0 is scratch, so a pool has at least two"
        assert page_size >= 1
        assert window >= 1
        self.pages, self.page_size, self.window, self.prefix_cache = pages, page_size, window, prefix_cache
        self._free = list(range(pages - 1, 0, -1))
        self._refs = [0] * pages
        self._hash: list[bytes | None] = [None] * pages
        self._kind = bytearray(pages)
        self._keep = bytearray(pages)
        self._index: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unheld; least recently used first
        self._attached: dict[int, Tables] = {}
        self._generation = [0] * pages  # of each page, how often its contents became another's
        self.on_end: Callable[[list[PageRef], End], None] | None = None
        self.on_full: Callable[[list[int]], None] | None = None
        self._peak = self._hit_tokens = self._query_tokens = self._evicted = 0

    # ---- contents -----------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that could be handed out now, cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def capacity(self) -> int:
        return self.pages - 1

    @property
    def attached(self) -> set[int]:
        """Ids of the tables that hold pages."""
        return set(self._attached)

    def stats(self) -> PageStats:
        return PageStats(
            total=self.capacity, used=self.capacity - self.available, cached=len(self._idle), peak_used=self._peak,
            hit_tokens=self._hit_tokens, query_tokens=self._query_tokens, evicted=self._evicted,
        )  # fmt: skip

    def first_needed(self, length: int) -> int:
        """The first sliding block that a query at or past `length`, or a later hit at its page boundary, can see."""
        return max(0, length // self.page_size * self.page_size - self.window + 1) // self.page_size

    def peak_pages(self, length: int, chunk: int) -> int:
        """Pages one sequence of `length` tokens holds at its worst moment, computed `chunk` tokens at a time."""
        blocks = -(-length // self.page_size)
        # The chunk starts anywhere in a page, so the window before it is measured from that page's start.
        span = -(-(self.window - 1) // self.page_size) + -(-(chunk - 1 + self.page_size) // self.page_size)
        return blocks + min(blocks, span)

    # ---- hashes and hits ----------------------------------------------------------------------

    def hash_blocks(self, tables: Tables, tokens: Sequence[int], length: int) -> None:
        """Extend `tables.hashes` over the whole pages of tokens[:length]."""
        size, hashes = self.page_size, tables.hashes
        for i in range(len(hashes), length // size):
            before = hashes[-1] if hashes else tables.salt
            block = array("i", tokens[i * size : (i + 1) * size]).tobytes()
            if tables.boundary is not None and (i + 1) * size > tables.boundary:
                block += tables.boundary.to_bytes(8, "little")
            hashes.append(blake2b(before + block, digest_size=16).digest())

    def match(self, tables: Tables, limit: int) -> Hit:
        """The longest prefix of at most `limit` tokens that both kinds can serve."""
        full, sliding = self._index
        return self._longest(tables.hashes, limit, full.__contains__, sliding.__contains__)

    def reach(self, tables: Tables, limit: int, stored: Callable[[int, bytes], bool]) -> int:
        """Blocks of the longest prefix that these pages and a store, which has what `stored` says, serve together."""
        full, sliding = self._index
        hit = self._longest(
            tables.hashes, limit, lambda h: h in full or stored(FULL, h), lambda h: h in sliding or stored(SLIDING, h)
        )
        return hit.blocks

    def absent(self, tables: Tables, blocks: int) -> list[tuple[int, bytes]]:
        """The pages, by kind and hash, that are missing here for a hit of so many blocks."""
        first = self.first_needed(blocks * self.page_size)
        needed = [(FULL, h) for h in tables.hashes[:blocks]] + [(SLIDING, h) for h in tables.hashes[first:blocks]]
        return [(kind, h) for kind, h in needed if h not in self._index[kind]]

    def _longest(
        self, hashes: list[bytes], limit: int, in_full: Callable[[bytes], bool], in_sliding: Callable[[bytes], bool]
    ) -> Hit:
        full_blocks, stop = 0, min(limit // self.page_size, len(hashes))
        while full_blocks < stop and in_full(hashes[full_blocks]):
            full_blocks += 1
        blocks = full_blocks
        while blocks:
            first = self.first_needed(blocks * self.page_size)
            for j in range(blocks - 1, first - 1, -1):
                if not in_sliding(hashes[j]):
                    blocks = j  # every boundary in (j, blocks] needs block j too
                    break
            else:
                break
        return Hit(blocks, full_blocks)

    def cost(self, tables: Tables, hit: Hit, length: int, chunk: int) -> int:
        """Most by which `available` can fall if a sequence of `length` tokens starts from `hit`."""
        full, sliding = self._index
        first = self.first_needed(hit.blocks * self.page_size)
        shared = sum(self._refs[full[h]] > 0 for h in tables.hashes[: hit.blocks])
        shared += sum(self._refs[sliding[h]] > 0 for h in tables.hashes[first : hit.blocks])
        return self.peak_pages(length, chunk) - shared

    def releasable(self, tables: Tables) -> int:
        """The rise of `available` if a sequence gives its pages back."""
        return sum(self._refs[page] == 1 for page in (*tables.full, *tables.sliding[tables.first :]))

    # ---- a sequence's life --------------------------------------------------------------------

    def attach(self, tables: Tables, hit: Hit, num_prompt_tokens: int) -> None:
        """Take the pages of `hit`. The length of the prompt decides which windows are kept for later requests."""
        assert not tables.attached
        assert not tables.full
        size, hashes = self.page_size, tables.hashes
        first = self.first_needed(hit.blocks * size)
        full, sliding = self._index
        tables.full = [full[h] for h in hashes[: hit.blocks]]
        tables.sliding = [SCRATCH] * first + [sliding[h] for h in hashes[first : hit.blocks]]
        tables.first = first
        tables.length = hit.blocks * size
        tables.prompt = num_prompt_tokens
        tables.attached = True
        self._attached[id(tables)] = tables
        for page in tables.full:
            self._hold(page)
        for page in tables.sliding[first:]:
            self._hold(page)
        self._hit_tokens += tables.length
        self._query_tokens += num_prompt_tokens
        # An equal prompt can reuse all but its last token; a longer one can reuse all of it.
        tables.keep.clear()
        for end in {(num_prompt_tokens - 1) // size, num_prompt_tokens // size, hit.full_blocks}:
            tables.keep.update(range(self.first_needed(end * size), end))
        self._peak = max(self._peak, self.capacity - self.available)

    def extend(self, tables: Tables, length: int) -> bool:
        """Make room for `length` tokens in both tables; all or nothing."""
        assert tables.attached
        blocks = -(-length // self.page_size)
        more = blocks - len(tables.full)
        if more <= 0:
            return True
        if 2 * more > self.available:
            return False
        for _ in range(more):
            tables.full.append(self._take(FULL))
            tables.sliding.append(self._take(SLIDING))
        self._peak = max(self._peak, self.capacity - self.available)
        return True

    def commit(self, tables: Tables, tokens: Sequence[int], length: int) -> None:
        """tokens[:length] are final: publish their complete pages, give back the pages that the window has passed."""
        size = self.page_size
        before, done = tables.length // size, length // size
        assert length >= tables.length
        assert -(-length // size) <= len(tables.full)
        prompt_ends = tables.length < tables.prompt <= length
        tables.length = length
        if before != done:
            self._publish_blocks(tables, tokens, before, done)
        if prompt_ends and self.on_end is not None:
            self.on_end(self._findable(tables), "prompt")

    def _publish_blocks(self, tables: Tables, tokens: Sequence[int], before: int, done: int) -> None:
        length = tables.length
        self.hash_blocks(tables, tokens, length)
        for i in range(before, done):
            self._publish(tables.full[i], FULL, tables.hashes[i])
            self._publish(tables.sliding[i], SLIDING, tables.hashes[i])
        if self.on_full is not None:
            self.on_full(tables.full[before:done] + tables.sliding[before:done])
        first = self.first_needed(length)
        for i in range(tables.first, first):
            self._drop_sliding(tables, i)
        tables.first = max(first, tables.first)

    def release(self, tables: Tables, *, preempted: bool = False) -> None:
        """Give back all pages of a sequence. What is committed stays findable, its last window included."""
        if not tables.attached:
            return
        done = tables.length // self.page_size
        tables.keep.update(range(self.first_needed(tables.length), done))
        if self.on_end is not None and done:
            self.on_end(self._findable(tables), "preempted" if preempted else "sequence")
        for i in range(len(tables.full) - 1, -1, -1):  # the tail is evicted before what it builds on
            self._drop(tables.full[i])
            if i >= tables.first:
                self._drop_sliding(tables, i)
        tables.full, tables.sliding = [], []
        tables.first = tables.length = 0
        tables.attached = False
        del self._attached[id(tables)]

    def forget(self, tables: Tables) -> list[int]:
        """Make everything that this sequence has stored unfindable. Returns the pages whose contents are now useless:
        those that no other sequence holds, and those that were cached for it."""
        pages = [page for page in (*tables.full, *tables.sliding) if page != SCRATCH]
        cached = [p for h in tables.hashes if (p := self._index[SLIDING].get(h)) is not None and p not in pages]
        for page in (*pages, *cached):
            self._forget(page)
        for page in cached:
            if self._refs[page] == 0:
                del self._idle[page]
                self._free.append(page)
        tables.hashes.clear()
        tables.keep.clear()
        return [page for page in pages if self._refs[page] == 1] + [page for page in cached if self._refs[page] == 0]

    # ---- pages of a store ---------------------------------------------------------------------

    def _findable(self, tables: Tables) -> list[PageRef]:
        """The committed pages of a sequence that later sequences can find, windows to be kept included."""
        done = min(tables.length // self.page_size, len(tables.hashes))  # without hashes: it was forgotten
        last = range(min(done, self.first_needed(tables.length)), done)
        blocks = ((FULL, range(done)), (SLIDING, sorted(tables.keep.intersection(range(done)).union(last))))
        refs = []
        for kind, numbers in blocks:
            for i in numbers:
                page = self._index[kind].get(tables.hashes[i])
                if page is not None:
                    refs.append(PageRef(kind, tables.hashes[i], page, self._generation[page]))
        return refs

    def unchanged(self, ref: PageRef) -> bool:
        """Whether the page still held what it refers to when this was called; safe in any thread."""
        return self._generation[ref.page] == ref.generation

    def insert(self, kind: int, h: bytes) -> int | None:
        """A page for what a store has, findable from now on and held by no sequence; the caller writes it before the
        next step. None if it is here already, or if every page is held."""
        if h in self._index[kind] or not self.available:
            return None
        page = self._take(kind)
        self._publish(page, kind, h)
        self._keep[page] = kind == SLIDING
        self._drop(page)
        return page

    # ---- single pages -------------------------------------------------------------------------

    def _take(self, kind: int) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._evicted += 1
        self._generation[page] += 1
        self._refs[page] = 1
        self._kind[page] = kind
        return page

    def _hold(self, page: int) -> None:
        if self._refs[page] == 0:
            del self._idle[page]
        self._refs[page] += 1

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if self._hash[page] is not None and (self._kind[page] == FULL or self._keep[page]):
            self._idle[page] = None
        else:
            self._forget(page)
            self._free.append(page)

    def _drop_sliding(self, tables: Tables, block: int) -> None:
        """Drop a sliding page, first marking the findable copy of its block if it is to be kept."""
        if block in tables.keep and block < len(tables.hashes):
            h = tables.hashes[block]
            if block < tables.length // self.page_size:
                self._publish(tables.sliding[block], SLIDING, h)
            page = self._index[SLIDING].get(h)
            if page is not None:
                self._keep[page] = 1
        self._drop(tables.sliding[block])
        tables.sliding[block] = SCRATCH

    def _publish(self, page: int, kind: int, h: bytes) -> None:
        if h not in self._index[kind] and self._hash[page] is None:
            self._index[kind][h] = page
            self._hash[page] = h

    def _forget(self, page: int) -> None:
        h = self._hash[page]
        if h is not None:
            del self._index[self._kind[page]][h]
            self._hash[page] = None
            self._generation[page] += 1
        self._keep[page] = 0

    # ---- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant, from scratch. Tests call it after every operation; it is far too slow for serving."""
        refs = [0] * self.pages
        for t in self._attached.values():
            assert t.attached
            assert len(t.full) == len(t.sliding), "the tables of the two kinds cover the same blocks"
            assert -(-t.length // self.page_size) <= len(t.full), "committed tokens without a page"
            assert all(p == SCRATCH for p in t.sliding[: t.first])
            assert all(p != SCRATCH for p in t.sliding[t.first :])
            assert SCRATCH not in t.full
            assert t.first <= self.first_needed(t.length), "a page inside the window was given back"
            assert t.first == self.first_needed(t.length), "a page outside the window is still held"
            for kind, table in ((FULL, t.full), (SLIDING, t.sliding[t.first :])):
                for page in table:
                    refs[page] += 1
                    assert self._kind[page] == kind, f"page {page} is in a table of the other kind"
        assert refs == self._refs, "reference counts differ from what the tables hold"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle
        assert SCRATCH not in free | idle
        in_use = {p for p in range(1, self.pages) if refs[p]}
        assert not in_use & (free | idle), "a held page can be handed out"
        assert in_use | free | idle == set(range(1, self.pages)), "a page leaked"
        for kind, index in enumerate(self._index):
            for h, page in index.items():
                assert self._hash[page] == h
                assert self._kind[page] == kind
        assert sum(h is not None for h in self._hash) == sum(len(i) for i in self._index)
        assert all(self._hash[p] is None and not self._keep[p] for p in free), "a free page can still be found"
        assert all(self._hash[p] is not None for p in idle), "a cached page cannot be found"
        assert all(self._kind[p] == FULL or self._keep[p] for p in idle), "a sliding page is cached without a mark"
        assert self._peak >= len(in_use)
