"""Pages: invariants after every operation, contents through the tables, and what a hit may and may not find."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from halfbyte.kv.pages import SCRATCH, Hit, PagePool, Tables


class Shadow:
    """A pool and what its pages would contain: each slot remembers the whole prefix its token was computed from."""

    def __init__(self, pages: int, page_size: int, window: int) -> None:
        self.pool = PagePool(pages, page_size, window)
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}

    def open(self, tokens: list[int], prompt: int) -> Tables:
        tables = Tables()
        self.pool.hash_blocks(tables, tokens, prompt)
        self.pool.attach(tables, self.pool.match(tables, prompt - 1), prompt)
        self.verify(tables, tokens)
        return tables

    def advance(self, tables: Tables, tokens: list[int], length: int) -> bool:
        if not self.pool.extend(tables, length):
            return False
        size = self.pool.page_size
        for p in range(tables.length, length):
            for table in (tables.full, tables.sliding):
                page = table[p // size]
                assert page != SCRATCH
                self.cells[page, p % size] = tuple(tokens[: p + 1])
        self.pool.commit(tables, tokens, length)
        self.verify(tables, tokens)
        return True

    def verify(self, tables: Tables, tokens: list[int]) -> None:
        size = self.pool.page_size
        for p in range(tables.length):
            assert self.cells[tables.full[p // size], p % size] == tuple(tokens[: p + 1])
            if p > tables.length - self.pool.window:
                assert self.cells[tables.sliding[p // size], p % size] == tuple(tokens[: p + 1])
        self.pool.check()


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_keep_every_invariant_and_every_cell(seed: int) -> None:
    rng = random.Random(seed)
    size, window = rng.choice([1, 3, 4, 8]), rng.choice([1, 5, 8, 13])
    shadow = Shadow(rng.randint(12, 70), size, window)
    alive: list[tuple[Tables, list[int], int]] = []
    pasts = [[rng.randrange(3) for _ in range(60)] for _ in range(3)]
    for _ in range(150):
        action = rng.random()
        if action < 0.35 and len(alive) < 5:
            past = rng.choice(pasts)
            tokens = past[: rng.randint(1, 40)] + [rng.randrange(3) for _ in range(30)]
            pasts.append(tokens)
            alive.append((shadow.open(tokens, rng.randint(1, len(tokens) - 10)), tokens, 0))
        elif action < 0.85 and alive:
            tables, tokens, _ = rng.choice(alive)
            length = min(len(tokens), tables.length + rng.randint(1, 12))
            free = shadow.pool.available
            missing = 2 * max(0, -(-length // shadow.pool.page_size) - len(tables.full))
            assert shadow.advance(tables, tokens, length) == (missing <= free)
        elif alive:
            shadow.pool.release(alive.pop(rng.randrange(len(alive)))[0])
            shadow.pool.check()
    for tables, _, _ in alive:
        shadow.pool.release(tables)
    shadow.pool.check()
    assert shadow.pool.available == shadow.pool.capacity, "pages leaked"


def run(shadow: Shadow, tokens: list[int], prompt: int, chunk: int = 7) -> tuple[int, Tables]:
    """Compute all tokens, chunk by chunk, then close. -> cached tokens at the start."""
    tables = shadow.open(tokens, prompt)
    hit = tables.length
    while tables.length < len(tokens):
        step = min(chunk, prompt - tables.length) if tables.length < prompt else 1
        assert shadow.advance(tables, tokens, tables.length + step)
    shadow.pool.release(tables)
    shadow.pool.check()
    return hit, tables


def test_a_prompt_end_is_found_again_after_the_generation_ran_past_its_window() -> None:
    shadow = Shadow(200, 4, 8)
    prompt = list(range(100, 142))
    assert run(shadow, prompt + list(range(50)), 42)[0] == 0
    # the next turn drops what was generated (harmony drops old analysis) and continues from the prompt's end
    assert run(shadow, [*prompt, 7, 7, 7, *range(20)], 60)[0] == 40
    # the same prompt again: all but its last token is reusable
    assert run(shadow, [*prompt, 1], 42)[0] == 40


def test_a_turn_end_is_found_again() -> None:
    shadow = Shadow(200, 4, 8)
    turn = list(range(63))
    run(shadow, turn, 20)
    assert run(shadow, [*turn, 1, 2, 3, 4, 5], 68)[0] == 60


def test_a_window_that_was_given_back_is_never_found() -> None:
    shadow = Shadow(300, 4, 8)
    prompt = list(range(100))
    run(shadow, prompt + [1] * 20, 100)
    fork = prompt[:52] + [999] * 30
    tables = Tables()
    shadow.pool.hash_blocks(tables, fork, 82)
    hit = shadow.pool.match(tables, 81)
    assert hit == Hit(blocks=0, full_blocks=13), "full pages reach 52 tokens, but no window was kept there"
    # the fork is computed once, its window is kept where the two part, and the third prompt profits
    assert run(shadow, fork, 82)[0] == 0
    assert run(shadow, prompt[:52] + [888] * 30, 82)[0] == 52


def test_a_page_taken_from_the_cache_returns_to_it() -> None:
    shadow = Shadow(300, 4, 8)
    prompt = list(range(40))
    run(shadow, [*prompt, 1], 40)
    for _ in range(3):
        assert run(shadow, prompt + list(range(30)), 60)[0] in (40, 56)
    assert run(shadow, [*prompt, 5, 5, 5, 5], 44)[0] == 40


def test_eviction_takes_the_least_recently_used_and_tails_first() -> None:
    shadow = Shadow(36, 4, 4)
    old, young = [1] * 32, [2] * 32
    run(shadow, old, 32)
    run(shadow, young, 32)
    run(shadow, [3] * 64, 64)  # needs more than is free
    assert shadow.pool.stats().evicted > 0
    lengths = []
    for tokens in (old, young):
        tables = Tables()
        shadow.pool.hash_blocks(tables, tokens, 32)
        lengths.append(shadow.pool.match(tables, 31).full_blocks)
    assert lengths[0] < 7
    assert lengths[1] == 7


def test_identical_prompts_side_by_side_share_and_survive_each_other() -> None:
    shadow = Shadow(100, 4, 8)
    tokens = list(range(30))
    first = shadow.open(tokens, 30)
    shadow.advance(first, tokens, 30)
    second = shadow.open(tokens, 30)
    assert second.length == 28
    assert second.full[:7] == first.full[:7]
    before = shadow.pool.stats().used
    shadow.pool.release(first)
    shadow.pool.check()
    shadow.advance(second, tokens, 30)
    assert shadow.pool.stats().used <= before
    shadow.pool.release(second)
    shadow.pool.check()


def test_salt_separates() -> None:
    pool = PagePool(50, 4, 8)
    a, b = Tables(salt=b"a"), Tables(salt=b"b")
    for t in (a, b):
        pool.hash_blocks(t, list(range(16)), 16)
    assert not set(a.hashes) & set(b.hashes)


def test_peak_pages_is_within_a_page_of_the_worst_that_happens() -> None:
    """The bound that admission relies on is never passed, and is within a page of what is reached."""
    for size, window, chunk, length in [(64, 128, 2048, 32768), (4, 8, 6, 90), (3, 7, 5, 80), (8, 1, 1, 64)]:
        worst = 0
        for offset in range(size):
            pool = PagePool(4 * length // size + 8, size, window)
            tables, tokens = Tables(), [0] * length
            pool.attach(tables, Hit(), length)
            ends = [*range(offset, length, chunk), length]
            for start, end in pairwise([0, *ends]):
                if end > start:
                    assert pool.extend(tables, end)
                    pool.commit(tables, tokens, end)
            worst = max(worst, pool.stats().peak_used)
            assert worst <= pool.peak_pages(length, chunk)
        assert worst >= pool.peak_pages(length, chunk) - 1


def test_peak_for_32k_tokens_on_120b_is_at_most_55_percent_of_a_uniform_cache() -> None:
    """36 layers = 18 sliding + 18 full, window 128, page 64: a page is 64 tokens of 18 layers.

    Uniform: 32768 / 64 = 512 blocks x 2 kinds = 1024 pages. Here: 512 full, and of the sliding kind the window
    (ceil(127 / 64) = 2) and the chunk (2048 / 64 = 32; chunks start on page boundaries): 546 pages, 53.3 %.
    """
    pool = PagePool(2000, 64, 128)
    tables, tokens = Tables(), [0] * 32768
    pool.attach(tables, Hit(), 32768)
    for end in range(2048, 32769, 2048):
        assert pool.extend(tables, end)
        pool.commit(tables, tokens, end)
    uniform = 2 * 32768 // 64
    assert pool.stats().peak_used == 546
    assert pool.stats().peak_used / uniform <= 0.55


def test_a_sequence_that_is_forgotten_is_found_by_nobody() -> None:
    """What it shares with others stays theirs; what only it held, and what was kept for it, is named to be cleared."""
    shadow = Shadow(40, 4, 8)
    tokens = list(range(30))
    first = shadow.open(tokens, 30)
    assert shadow.advance(first, tokens, 17)
    second = shadow.open([*tokens[:16], 99, 99], 18)
    assert shadow.advance(first, tokens, 30)
    shared = set(second.full) & set(first.full)
    assert shared
    mine = set(shadow.pool.forget(first))
    shadow.pool.check()
    assert mine >= set(first.full) - shared
    assert not mine & (set(second.full) | set(second.sliding))
    probe = Tables()
    shadow.pool.hash_blocks(probe, tokens, 30)
    assert shadow.pool.match(probe, 29).blocks == 0
    shadow.pool.release(first)
    shadow.pool.check()
    shadow.pool.release(second)
    shadow.pool.check()
    assert shadow.pool.stats().used == 0


def test_pages_behind_a_boundary_are_found_by_sequences_with_that_boundary_alone() -> None:
    tokens = list(range(40))
    pool = PagePool(40, 4, 8)

    def hashes(boundary: int | None) -> list[bytes]:
        tables = Tables(boundary=boundary)
        pool.hash_blocks(tables, tokens, 40)
        return tables.hashes

    plain, early, late = hashes(None), hashes(13), hashes(20)
    assert early[:3] == plain[:3] == late[:3]  # the page of position 13 is the fourth
    assert late[:5] == plain[:5]
    assert not set(early[3:]) & {*plain, *late}
    assert not set(late[5:]) & {*plain, *early}
    assert early == hashes(13)
