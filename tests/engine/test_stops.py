"""Stop strings on bytes, across token boundaries, against a search in the whole text."""

from __future__ import annotations

import random

import pytest

from halfbyte.engine.stops import ByteStopMatcher


def feed(pieces: list[bytes], stops: tuple[str, ...]) -> tuple[ByteStopMatcher, int, list[int]]:
    """-> matcher, tokens read, what was visible after each."""
    matcher = ByteStopMatcher(stops, lambda i: pieces[i])
    shown = []
    for i in range(len(pieces)):
        done = matcher.add(i)
        shown.append(matcher.visible)
        if done:
            return matcher, i + 1, shown
    matcher.finish()
    return matcher, len(pieces), [*shown, matcher.visible]


@pytest.mark.parametrize("seed", range(30))
def test_against_a_search_in_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        alphabet = rng.choice(["ab", "abé", "ab\n"])
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 25))).encode()
        stops = tuple({"".join(rng.choice(alphabet) for _ in range(rng.randint(1, 5))) for _ in range(2)})
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, 4)
            pieces.append(text[at : at + size])
            at += size
        matcher, used, shown = feed(pieces, stops)
        seen = b"".join(pieces[:used])
        assert shown == sorted(shown), "what was shown is taken back"
        hits = [(seen.find(s.encode()), s) for s in stops if s.encode() in seen]
        if matcher.matched is None:
            assert not hits
            assert used == len(pieces)
            assert matcher.visible == len(text)
        else:
            assert matcher.visible == min(hits)[0]
            assert seen[matcher.visible :].startswith(matcher.matched.encode())
            before = b"".join(pieces[: used - 1])
            assert not any(s.encode() in before for s in stops), "it should have stopped earlier"
        # nothing visible may belong to the match
        assert all(v <= matcher.visible for v in shown)


def test_what_could_become_a_match_is_held_back_and_nothing_else() -> None:
    matcher = ByteStopMatcher(("END",), lambda i: [b"aE", b"N", b"x", b"E"][i])
    visible = []
    for i in range(4):
        assert not matcher.add(i)
        visible.append(matcher.visible)
    assert visible == [1, 1, 4, 4]
    matcher.finish()
    assert matcher.visible == 5


def test_a_match_may_end_inside_a_character() -> None:
    e = "é".encode()
    matcher, used, _ = feed([b"x" + e[:1], e[1:] + b"y"], ("é",))
    assert (matcher.matched, matcher.visible, used) == ("é", 1, 2)


def test_the_longer_of_two_that_begin_together_wins() -> None:
    matcher, _, _ = feed([b"abc"], ("ab", "abc"))
    assert matcher.matched == "abc"


def test_unarmed_nothing_matches_and_nothing_before_counts() -> None:
    matcher = ByteStopMatcher(("ab",), lambda i: [b"a", b"b", b"ab"][i])
    assert not matcher.add(0, armed=False)
    assert not matcher.add(1)
    assert matcher.add(2)
