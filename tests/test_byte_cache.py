"""A cache that is bounded by bytes."""

from __future__ import annotations

import random

from halfbyte.byte_cache import ByteCache


def test_bytes_and_number_stay_within_their_bounds_and_the_least_recently_used_go_first() -> None:
    draw = random.Random(4)
    cache: ByteCache[int, str] = ByteCache(1000, 20)
    recent: list[tuple[int, int]] = []  # key and size, the least recently used first
    for step in range(3000):
        key, size = draw.randrange(40), draw.choice((1, 30, 200, 999, 1000, 1001))
        entry = next((e for e in recent if e[0] == key), None)
        match draw.randrange(4):
            case 0:
                assert cache.remove(key) == (entry is not None)
                recent = [e for e in recent if e[0] != key]
            case 1:
                assert (cache.get(key) is None) == (entry is None)
                recent = [e for e in recent if e[0] != key] + ([entry] if entry else [])
            case _:
                cache.put(key, str(step), size)
                recent = [e for e in recent if e[0] != key]
                recent += [(key, size)] if size <= 1000 else []
                while sum(s for _, s in recent) > 1000 or len(recent) > 20:
                    recent.pop(0)
        assert cache.bytes == sum(s for _, s in recent) <= 1000
        assert len(cache) == len(recent) <= 20
        assert all(k in cache for k, _ in recent)


def test_a_value_that_is_too_large_pushes_nothing_out() -> None:
    cache: ByteCache[str, int] = ByteCache(10)
    cache.put("a", 1, 10)
    cache.put("b", 2, 11)
    assert (cache.get("a"), cache.get("b")) == (1, None)
