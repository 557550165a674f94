"""A core on the fake runner, and what the tests of its promises do with one."""

from __future__ import annotations

from engine_fakes import EOS, VOCAB, FakeRunner, FakeVocabulary

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.request import Delta, Output, SamplingParams
from halfbyte.errors import HalfbyteError

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
Got = dict[tuple[str, int], list[Delta]]


def make(pages: int = 200, page_size: int = 4, window: int = 8, fault=None, clock=None, **kw) -> EngineCore:
    settings = {"max_seqs": 8, "max_rows_per_step": 32, "max_context": 512, **kw}
    config = EngineConfig(pages=pages, page_size=page_size, window=window, vocab=VOCAB, eos_tokens=(EOS,), **settings)
    runner = FakeRunner(pages, page_size, window, fault=fault, on_host=config.host_steps)
    return EngineCore(runner, config, FakeVocabulary(), **({"clock": clock} if clock else {}))


def collect(outputs: list[Output], into: Got) -> None:
    for id, delta in outputs:
        into.setdefault((id, delta.index), []).append(delta)


def drain(core: EngineCore, out: Got | None = None) -> Got:
    out = {} if out is None else out
    steps = 0
    while core.has_work:
        collect(core.step(), out)
        core.check()
        steps += 1
        assert steps < 5000
    collect(core.step(), out)
    assert core.pages.available == core.pages.capacity, "pages leaked"
    return out


def tokens_of(deltas: list[Delta]) -> list[int]:
    assert [d.finish is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    return [t for d in deltas for t in d.tokens]


def refused(core: EngineCore) -> list[tuple[str, HalfbyteError]]:
    """Steps until the core has nothing more to do; whom it refused."""
    out: list[tuple[str, HalfbyteError]] = []
    while core.has_work:
        core.step()
        core.check()
        out += core.refusals()
    return out
