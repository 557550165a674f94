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
from halfbyte.model.gpt_oss import PAGE_SIZE
from halfbyte.model.self_test import way_of

WARM_UPS = ("fast", "full", "off")


def _warm_up(text: str) -> str:
    if text not in WARM_UPS:
        raise UsageError(f"--warm-up is {text!r}; use one of {', '.join(WARM_UPS)}.")
    return text


@dataclass(frozen=True)
class EngineOptions:
    model: str | None = None  # a folder, a .gguf file, random:20b; None: the embedded model
    gates: Gates = field(default_factory=Gates)
    device: str | None = None
    allow_nan: bool = flag(False, "--allow-nan", "Serve a model although some of its weights are no numbers.")
    max_context: int | None = flag(None, "--max-context", "Tokens of prompt and answer together.", minimum=1)
    max_seqs: int = flag(64, "--max-seqs", "Requests that run at once; more wait.", minimum=1)
    max_tokens: int | None = flag(  # while nobody decodes
        None, "--max-tokens-per-step", "Rows of one step: chunk of a long prompt. Default: by the device.", minimum=1
    )
    beside_decode: int | None = flag(
        None, "--max-tokens-beside-decode", "The same while others decode, who wait for it. Default: by the device.",
        minimum=1,
    )  # fmt: skip
    max_waiting: int = field(default=4096, metadata={"minimum": 1})
    page_size: int = field(default=PAGE_SIZE, metadata={"minimum": 1})
    # Without it: what is free beside the reserve, at most for max_seqs contexts.
    kv_gib: float | None = flag(None, "--kv-memory", "GiB of KV cache; default: what is free.", minimum=0)
    reserve_gib: float | None = flag(None, "--reserve", "GiB of memory that stays free.", minimum=0)
    run_ahead: bool = True
    prefix_cache: bool = True
    warm_up: str = flag(  # of an engine that is served; others warm up by what they are asked
        "full", "--warm-up", "What is compiled and captured before ready: fast, full or off.", parse=_warm_up
    )
    self_test: str = flag(
        "auto", "--self-test", "Of the GPU's kernels, before loading: auto, always or off.", parse=way_of
    )
    draft: str | None = flag(None, "--draft", "Model or head that --speculate draft or eagle3 uses.")
    max_draft: int = field(default=8, metadata={"minimum": 0})
    record: str | None = flag(  # of an engine in a process of its own
        None, "--record", "A file that says, once the engine has ended, which kernels ran: for `halfbyte check`."
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
