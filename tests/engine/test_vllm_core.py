"""vLLM behind the calls of our own core, with a scripted engine in its place: no token is lost, nobody waits on."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.engine.request import Constraint, Delta, Request, SamplingParams
from halfbyte.engine.vllm_core import VllmCore
from halfbyte.errors import ContextError, EngineDiedError, PlanError, RequestError
from halfbyte.vllm_plugin import compat
from halfbyte.vllm_plugin.compat_engine import Gained, Load

EOS = 9


class Vocabulary:
    """a to i, two end tokens, l."""

    eos_tokens = (EOS, 10)
    vocab_size = 12
    special = {"<end>": EOS, "<stop>": 10}

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return {9: b"", 10: b""}.get(token, chr(ord("a") + token).encode())

    @staticmethod
    def encode(text: str) -> list[int]:
        return [ord(c) - ord("a") for c in text]


class Scripted:
    """Gives each request its tokens, two a step, as vLLM's engine does."""

    max_context, vocab, ranks, max_seqs, eos, masks = 32, 12, 1, 4, (EOS,), True

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.open, self.added, self.aborted = tokens, {}, {}, []  # type: ignore[var-annotated]
        self.dies = False

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, id: str, prompt: list[int], **sampling: Any) -> None:
        self.added[id] = sampling
        self.open[id] = [0] * sampling.get("n", 1)

    def load(self) -> Load:
        return Load(len(self.open), 0, 10, 2 * len(self.open))

    def abort(self, id: str) -> None:
        self.aborted.append(id)
        self.open.pop(id, None)

    def step(self) -> list[Gained]:
        if self.dies:
            raise RuntimeError("CUDA error")
        gained = []
        for id, places in list(self.open.items()):
            sampling = self.added[id]
            for index, at in enumerate(places):
                if at < 0:
                    continue
                limit = min(len(self.tokens), sampling["max_tokens"])
                new = self.tokens[at : min(at + 2, limit)]
                stop = next((i for i, t in enumerate(new) if t in sampling.get("stop_token_ids", ())), None)
                if stop is not None:
                    new = new[: stop + 1]
                finish = "stop" if stop is not None else "length" if at + len(new) >= limit else None
                logprobs = (
                    [[(t, -0.5), (t, -0.5), (0, -2.0)] for t in new] if sampling["logprobs"] is not None else None
                )
                gained.append(Gained(id, index, new, logprobs, finish, 1))
                places[index] = -1 if finish else at + len(new)
            if all(at < 0 for at in places):
                del self.open[id]
        return gained

    def close(self) -> None:
        self.open.clear()


def core(tokens: list[int]) -> tuple[VllmCore, Scripted]:
    engine = Scripted(tokens)
    return VllmCore(engine, Vocabulary()), engine  # type: ignore[arg-type]


def finish(core: VllmCore) -> list[tuple[str, Delta]]:
    out, steps = [], 0
    while core.has_work:
        steps += not core.waits_for_grammars
        assert steps < 50, "it goes on and on"
        out += core.step()
    return out


def request(**sampling: Any) -> Request:
    return Request([1, 2, 3], SamplingParams(temperature=0.0, **sampling), id="r")


def test_tokens_come_out_as_they_are() -> None:
    c, engine = core([4, 5, 6, 7, 8])
    c.submit(request(max_tokens=5, logprobs=1))
    assert (c.stats().running, c.stats().waiting, c.stats().kv_pages_used, c.stats().kv_pages_total) == (1, 0, 2, 10)
    deltas = [d for _, d in finish(c)]
    assert [t for d in deltas for t in d.tokens] == [4, 5, 6, 7, 8]
    assert [d.finish for d in deltas] == [None, None, "length"]
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.cached_tokens, deltas[-1].usage.completion_tokens) == (
        3,
        1,
        5,
    )
    assert deltas[0].logprobs is not None
    assert (deltas[0].logprobs[0].token, deltas[0].logprobs[0].top) == (4, ((4, -0.5),))
    assert engine.added["r"]["ignore_eos"] is True
    assert set(engine.added["r"]["stop_token_ids"]) == {9, 10}
    stats = c.stats()
    assert (stats.running, stats.generated_tokens, stats.prefix_hit_tokens, stats.prefix_query_tokens) == (0, 5, 1, 3)


def test_an_end_token_ends_and_ignore_eos_does_not() -> None:
    c, _ = core([4, EOS, 5])
    c.submit(request(max_tokens=3))
    assert [(d.tokens, d.finish) for _, d in finish(c)] == [([4, EOS], "stop")]
    c, _ = core([4, EOS, 5])
    c.submit(request(max_tokens=3, ignore_eos=True))
    assert [t for _, d in finish(c) for t in d.tokens] == [4, EOS, 5]


def test_without_a_limit_it_is_the_context() -> None:
    c, engine = core([4])
    c.submit(request())
    assert engine.added["r"]["max_tokens"] == 29


def test_a_stop_string_across_tokens_ends_the_choice_and_vllms_request() -> None:
    c, engine = core([4, 5, 6, 7, 8, 8])
    c.submit(request(max_tokens=6, stop=("gh",)))  # tokens 6, 7
    deltas = [d for _, d in finish(c)]
    assert [t for d in deltas for t in d.tokens] == [4, 5, 6, 7]
    assert (deltas[-1].finish, deltas[-1].stop_match, deltas[-1].visible_bytes) == ("stop", "gh", 2)
    assert engine.aborted == ["r"]
    assert not c.has_work


def test_choices_end_each_on_its_own() -> None:
    c, _ = core([4, 5, 6])
    c.submit(request(max_tokens=3, n=2))
    deltas = finish(c)
    for index in (0, 1):
        assert [t for _, d in deltas if d.index == index for t in d.tokens] == [4, 5, 6]
    assert sum(d.finish is not None for _, d in deltas) == 2


def test_cancel_and_deadline() -> None:
    c, engine = core(list(range(8)))
    c.submit(request(max_tokens=8))
    assert c.cancel("r")
    assert not c.cancel("r")
    assert [(d.finish, d.tokens) for _, d in finish(c)] == [("cancelled", [])]
    late = Request([1], SamplingParams(max_tokens=8), timeout=1e-9, id="late")
    c.submit(late)
    assert [d.finish for _, d in finish(c)] == ["timeout"]
    assert engine.aborted == ["r", "late"]


def test_a_request_that_vllm_forgot_is_told() -> None:
    c, engine = core([1, 2])
    c.submit(request(max_tokens=2))
    engine.open.clear()
    assert [(d.finish, bool(d.error)) for _, d in finish(c)] == [("error", True)]


def test_what_can_never_be_served() -> None:
    c, _ = core([1])
    for bad, sentence in (
        (Request([], SamplingParams()), "the prompt is empty"),
        (Request([12], SamplingParams()), "the vocabulary has 12"),
    ):
        with pytest.raises(RequestError, match=sentence):
            c.submit(bad)
    c.unmasked = "a drafting model runs"
    with pytest.raises(RequestError, match=c.unmasked):
        c.submit(Request([1], SamplingParams(), constraint=Constraint("json_object", "{}")))
    with pytest.raises(RequestError, match=r"top_n_sigma is 1\.5.*--engine halfbyte"):
        c.submit(request(top_n_sigma=1.5))
    with pytest.raises(ContextError, match="the context is 32"):
        c.submit(Request([1] * 32, SamplingParams()))
    with pytest.raises(ContextError, match="30 to generate"):
        c.submit(request(max_tokens=30))
    c.submit(request(max_tokens=1))
    with pytest.raises(RequestError, match="already running"):
        c.submit(request(max_tokens=1))


def constrained(pattern: str) -> Request:
    return Request([1, 2], SamplingParams(max_tokens=8), Constraint("regex", pattern), id="r")


def test_a_grammar_goes_with_its_request_and_the_answer_is_held_against_it() -> None:
    """It is compiled in parallel with the steps and sent to vLLM's processes."""
    for tokens, finish_, error in (
        ([3, 4, 5, EOS], "stop", None),
        ([3, 4, 6, EOS], "error", "token 6"),
        ([3, 4, EOS], "error", "token 9"),
    ):
        c, engine = core(tokens)
        c.submit(constrained("def"))
        last = finish(c)[-1][1]
        assert engine.added["r"]["extra"] == {
            "kind": "regex", "source": "def", "triggers": [], "end_tokens": [], "ends": [9, 10],
        }  # fmt: skip
        assert last.finish == finish_
        assert (last.error is None) if error is None else (error in (last.error or ""))
        c.close()


def test_a_grammar_that_cannot_be_is_refused_and_one_that_is_prepared_can_be_cancelled() -> None:
    c, engine = core([3])
    c.submit(constrained("("))
    refused: list[Any] = []
    while c.has_work:
        assert c.step() == []
        refused += c.refusals()
    assert [id for id, _ in refused] == ["r"]
    assert "the regex of this request cannot be" in str(refused[0][1])
    assert engine.added == {}
    c.submit(constrained("de*"))
    assert c.cancel("r")
    assert [d.finish for _, d in finish(c)] == ["cancelled"]
    with pytest.raises(RequestError, match="cannot be"):  # known by now
        c.submit(constrained("("))
    c.close()


def test_masks_are_proved_before_they_are_promised() -> None:
    class Held(Scripted):
        """Answers as its grammar says, or with the same tokens whatever it says."""

        obeys = True

        def add(self, id: str, prompt: list[int], **sampling: Any) -> None:
            digits = sampling["extra"]["source"].startswith("[0-9]")
            self.tokens = [*([0] * 4 if digits and self.obeys else [1] * 4), EOS]
            super().add(id, prompt, logprobs=None, **sampling)

    class Letters(Vocabulary):
        @staticmethod
        def token_bytes(token: int) -> bytes:
            return {0: b"7", 1: b"A"}.get(token, b"")

    engine = Held([])
    c = VllmCore(engine, Letters())  # type: ignore[arg-type]
    c.prove_masks()
    assert c.unmasked == ""
    engine.obeys = False
    c.prove_masks()
    assert "masked" in c.unmasked
    c.close()


def test_an_engine_that_dies_says_of_what() -> None:
    c, engine = core([1, 2, 3])
    c.submit(request(max_tokens=3))
    engine.dies = True
    with pytest.raises(EngineDiedError, match="RuntimeError: CUDA error"):
        c.step()


def test_without_the_plugin_nothing_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    engine = Scripted([1, 2])
    engine.step = lambda: engine.open.clear() or []  # type: ignore[method-assign, func-returns-value]
    c = VllmCore(engine, Vocabulary())  # type: ignore[arg-type]
    monkeypatch.setattr(compat, "_inside", None)
    with pytest.raises(PlanError, match="VLLM_PLUGINS"):
        c.prove(str(tmp_path / "none.json"))
    (tmp_path / "ran.json").write_text('{"differences": ["cpu.moe (decode): was chosen and never ran"], "plan": {}}')
    with pytest.raises(PlanError, match=r"inside vLLM cpu\.moe"):
        c.prove(str(tmp_path / "ran.json"))
    (tmp_path / "good.json").write_text('{"differences": [], "plan": {"decode": ["cpu.moe"]}}')
    assert c.prove(str(tmp_path / "good.json")) == {"decode": ["cpu.moe"]}
