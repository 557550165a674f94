"""EngineOptions: everything that a caller can choose about an engine, in one frozen record of plain values.

`halfbyte serve`, the Python API or a benchmark makes it once; it is passed unchanged to where the engine is built, also
into another process. The record refuses a value of the wrong type or out of range. `halfbyte.engine.build` decides what
a field means for memory and kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import get_type_hints

from halfbyte.errors import UsageError
from halfbyte.flags import flag
from halfbyte.gates import Gates
from halfbyte.memory import GIB, parse_size
from halfbyte.model.config import PAGE_SIZE
from halfbyte.records import MismatchError, convert

WARM_UPS = ("fast", "full", "off")
PAGE_CACHES = ("auto", "keep", "drop")
PREFIX_MEMORY, PREFIX_DISK = 8 * GIB, 32 * GIB
LARGEST = 1 << 63  # options travel to the engine's process as 64-bit integers


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
    allow_nan: bool = flag(
        False, "--allow-nan", "Serve the model even if some of its weights are not numbers or all zeros."
    )
    max_context: int | None = flag(
        None, "--max-context", "Most tokens of a prompt and its answer together; default: the model's limit.",
        spellings=("--max-model-len",), minimum=1,
    )  # fmt: skip
    max_seqs: int = flag(
        64, "--max-seqs", "Most requests answered at once; further ones wait.", spellings=("--max-num-seqs",), minimum=1
    )
    max_rows_per_step: int | None = flag(  # while no sequence decodes
        None, "--max-tokens-per-step", "Most tokens in one step; longer prompts are read in chunks of this size.",
        spellings=("--max-num-batched-tokens",), minimum=1,
    )  # fmt: skip
    max_rows_with_decode: int | None = flag(
        None, "--max-tokens-with-decode", "Most tokens in a step in which other requests wait for their next token.",
        spellings=("--max-tokens-beside-decode",), minimum=1,
    )  # fmt: skip
    max_rows_in_burst: int | None = flag(
        None, "--max-tokens-in-burst",
        "The same while many prompts arrive at once; default: more on a large GPU, but as many where that is given.",
        minimum=1,
    )  # fmt: skip
    max_waiting: int = field(default=4096, metadata={"minimum": 1})
    page_size: int = field(default=PAGE_SIZE, metadata={"minimum": 1})
    # None: what is free minus the reserve, at most enough for max_seqs contexts.
    kv_gib: float | None = flag(None, "--kv-memory", "GiB for the KV cache; default: all free memory.", minimum=0)
    gpu_memory: int | None = flag(
        None, "--gpu-memory", "Most memory to use on the GPU, for example 24GiB; experts that do not fit stay in host "
        "memory.", parse=parse_size, minimum=1, metavar="SIZE",
    )  # fmt: skip
    reserve_gib: float | None = flag(None, "--reserve", "GiB of memory to leave free.", minimum=0)
    page_cache: str = flag(
        "auto", "--page-cache",
        "Whether the model's files stay in the page cache after loading: keep, drop or auto, which drops them where "
        "GPU and host share one memory or a cgroup limits it.", parse=_page_cache,
    )  # fmt: skip
    run_ahead: bool = True
    prefix_cache: bool = True
    prefix_memory: int | None = flag(  # None: a quarter of what is available, at most 8 GiB
        None, "--prefix-memory",
        "Host memory for the beginnings of prompts, for example 8GiB; default: a quarter of the free memory, at most "
        "8GiB; 0 switches it off.", parse=parse_size, minimum=0, metavar="SIZE",
    )  # fmt: skip
    prefix_folder: str | None = flag(
        None, "--prefix-folder",
        "Keep the beginnings of prompts in this folder, so that they outlive the program. Prompts can be reconstructed "
        "from it; only its owner can read it.", metavar="DIR",
    )  # fmt: skip
    prefix_disk: int | None = flag(  # None: PREFIX_DISK
        None, "--prefix-disk", "Most that --prefix-folder may hold; default: 32GiB.", parse=parse_size, minimum=0,
        metavar="SIZE",
    )  # fmt: skip
    warm_up: str = flag(  # only of an engine that is served
        "full",
        "--warm-up",
        "How much to compile and capture before the first request: fast, full or off.",
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
    record: str | None = flag(  # only of an engine in its own process
        None, "--record", "Write to this file, when the engine ends, which kernels ran; `halfbyte check` reads it."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.gates, Gates):
            raise UsageError(f"gates is a {type(self.gates).__name__}; use gates.parse to make Gates.")
        hints = get_type_hints(EngineOptions)
        for f in fields(self):
            if f.name == "gates":
                continue
            value = getattr(self, f.name)
            least = f.metadata["flag"].minimum if "flag" in f.metadata else f.metadata.get("minimum")
            try:
                value = convert(float(value) if isinstance(value, float) else value, hints[f.name])
            except MismatchError as e:
                raise UsageError(f"the engine cannot be built: {f.name}: {e}.") from None
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"the engine cannot be built: {f.name} is {value}, which is not a finite number.")
            if isinstance(value, int) and value >= LARGEST:
                raise UsageError(f"the engine cannot be built: {f.name} is a number of more than 64 bits.")
            if least is not None and value is not None and value < least:
                raise UsageError(f"the engine cannot be built: {f.name} is {value}; give at least {least}.")
            object.__setattr__(self, f.name, value)
        _warm_up(self.warm_up)
        _page_cache(self.page_cache)
