"""Everything an engine is made from, in one frozen record of plain values.

Whoever starts an engine (`halfbyte serve`, the Python API, a benchmark) makes it once; it travels unchanged to where
the engine is built, also into another process. A value of another type than its field's, or out of its range, is
refused when the record is made. What a field means for memory and kernels is decided in `halfbyte.engine.build`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import get_type_hints

from halfbyte.engine.checked import WrongValueError, typed
from halfbyte.errors import UsageError
from halfbyte.flags import flag
from halfbyte.gates import Gates
from halfbyte.model.config import PAGE_SIZE

WARM_UPS = ("fast", "full", "off")
PAGE_CACHES = ("auto", "keep", "drop")


def _warm_up(text: str) -> str:
    if text not in WARM_UPS:
        raise UsageError(f"--warm-up is {text!r}; use one of {', '.join(WARM_UPS)}.")
    return text


def _self_test(text: str) -> str:
    from halfbyte.model.self_test import way_of  # needs torch, which the command line's help can do without

    return way_of(text)


def _page_cache(text: str) -> str:
    if text not in PAGE_CACHES:
        raise UsageError(f"--page-cache is {text!r}; use one of {', '.join(PAGE_CACHES)}.")
    return text


@dataclass(frozen=True)
class EngineOptions:
    model: str | None = None  # a folder, a .gguf file, random:20b; None: the embedded model
    gates: Gates = field(default_factory=Gates)
    device: str | None = None
    allow_nan: bool = flag(False, "--allow-nan", "Serve the model even if some of its weights are not numbers.")
    max_context: int | None = flag(
        None, "--max-context", "Most tokens of a prompt and its answer together; by default all that the model takes.",
        spellings=("--max-model-len",), minimum=1,
    )  # fmt: skip
    max_seqs: int = flag(
        64, "--max-seqs", "Most requests answered at once; further ones wait.", spellings=("--max-num-seqs",), minimum=1
    )
    max_tokens: int | None = flag(  # while nobody decodes
        None, "--max-tokens-per-step", "Most tokens in one step: longer prompts are read in chunks of so many.",
        spellings=("--max-num-batched-tokens",), minimum=1,
    )  # fmt: skip
    beside_decode: int | None = flag(
        None, "--max-tokens-beside-decode", "The same for steps in which other requests wait for their next token.",
        minimum=1,
    )  # fmt: skip
    max_waiting: int = field(default=4096, metadata={"minimum": 1})
    page_size: int = field(default=PAGE_SIZE, metadata={"minimum": 1})
    # Without it: what is free beside the reserve, at most for max_seqs contexts.
    kv_gib: float | None = flag(None, "--kv-memory", "GiB for the KV cache; by default what is free.", minimum=0)
    reserve_gib: float | None = flag(None, "--reserve", "GiB of memory to leave free.", minimum=0)
    page_cache: str = flag(
        "auto", "--page-cache",
        "What loading leaves of the model's files in the page cache: keep, drop, or auto: drop where GPU and host "
        "share one memory, or a cgroup limits it.", parse=_page_cache,
    )  # fmt: skip
    run_ahead: bool = True
    prefix_cache: bool = True
    warm_up: str = flag(  # of an engine that is served; others warm up by what they are asked
        "full",
        "--warm-up",
        "How much is compiled and captured before requests are taken: fast, full or off.",
        parse=_warm_up,
    )
    self_test: str = flag(
        "auto",
        "--self-test",
        "Test the GPU's kernels before the model is loaded: auto, always or off.",
        parse=_self_test,
    )
    draft: str | None = flag(None, "--draft", "The model or head that --speculate draft or eagle3 takes.")
    max_draft: int = field(default=8, metadata={"minimum": 0})
    record: str | None = flag(  # of an engine in a process of its own
        None, "--record", "Write to this file, when the engine ends, which kernels ran; `halfbyte check` reads it."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.gates, Gates):
            raise UsageError(f"an engine's gates are {type(self.gates).__name__}, not Gates; make them by gates.parse.")
        hints = get_type_hints(EngineOptions)
        try:
            for f in fields(self):
                if f.name == "gates":
                    continue
                value = typed(getattr(self, f.name), hints[f.name], f.name)
                object.__setattr__(self, f.name, value)
                least = f.metadata["flag"].minimum if "flag" in f.metadata else f.metadata.get("minimum")
                if isinstance(value, float) and not math.isfinite(value):
                    raise WrongValueError(f.name, f"is {value}, which is not a number")
                if least is not None and value is not None and value < least:
                    raise WrongValueError(f.name, f"is {value}; give at least {least}")
        except WrongValueError as e:
            raise UsageError(f"this engine cannot be made: {e}.") from None
        _warm_up(self.warm_up)
        _page_cache(self.page_cache)
