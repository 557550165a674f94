"""The CPU kernels' library in this process: which instruction set it was built for, and its structs as ctypes see them.

`open_library` selects the best instruction set of this CPU, or the one named. A library whose structs differ in size
from these mirrors, or that was built for another set than its name says, is not used. The caller owns all memory: it
must keep alive whatever a struct points to.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import EngineError, NotEnoughMemoryError, PlanError
from halfbyte.kernels.cpu.build import Unavailable, library_file, sets_for
from halfbyte.kernels.cpu.cores import Threads
from halfbyte.kernels.cpu.instruction_sets import InstructionSet

ABI = 1
FORMATS = {"f32": 0, "f16": 1, "bf16": 2, "q8": 3, "mxfp4": 4}
KV_FORMATS = {"f32": 0, "bf16": 2, "fp8": 5}
ERROR_BYTES = 512
CPUINFO = Path("/proc/cpuinfo")

_Ints, _Floats = ctypes.c_void_p, ctypes.c_void_p  # pointers, as numbers that torch and numpy give


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("attn_norm", _Floats),
        ("qkv", MatrixStruct),
        ("qkv_bias", _Floats),
        ("sinks", _Floats),
        ("o", MatrixStruct),
        ("o_bias", _Floats),
        ("mlp_norm", _Floats),
        ("router", _Floats),
        ("router_bias", _Floats),
        ("gate_up", MatrixStruct),
        ("gate_up_bias", _Floats),
        ("down", MatrixStruct),
        ("down_bias", _Floats),
        ("sliding", ctypes.c_int32),
        ("kind_index", ctypes.c_int32),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                "abi",
                "layers",
                "hidden",
                "intermediate",
                "experts",
                "top_k",
                "heads",
                "kv_heads",
                "head_dim",
                "vocab",
                "window",
                "page_size",
                "layers_per_page",
                "kv_format",
                "embed_format",
                "int8_activations",
            )
        ),
        ("norm_eps", ctypes.c_float),
        ("swiglu_limit", ctypes.c_float),
        ("swiglu_alpha", ctypes.c_float),
        ("rope_inverse", _Floats),
        ("rope_temperature", ctypes.c_float),
        ("embed", ctypes.c_void_p),
        ("layer", ctypes.POINTER(LayerStruct)),
        ("final_norm", _Floats),
        ("lm_head", MatrixStruct),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("logit_count", ctypes.c_int32),
        ("max_kv_len", ctypes.c_int32),
        ("tokens", _Ints),
        ("positions", _Ints),
        ("query_start", _Ints),
        ("kv_lens", _Ints),
        ("row_sequence", _Ints),
        ("sliding_table", _Ints),
        ("full_table", _Ints),
        ("table_stride", ctypes.c_int64),
        ("logit_rows", _Ints),
        ("kv_pool", ctypes.c_void_p),
        ("pages", ctypes.c_int64),
        ("logits", _Floats),
        ("best", _Ints),
        ("best_logit", _Floats),
        ("tap_layers", _Ints),
        ("tap_count", ctypes.c_int32),
        ("taps", _Floats),
        ("chosen", _Ints),
    ]


class ExpertsStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "intermediate", "experts", "top_k", "int8_activations")),
        ("swiglu_limit", ctypes.c_float),
        ("swiglu_alpha", ctypes.c_float),
        ("gate_up", MatrixStruct),
        ("gate_up_bias", _Floats),
        ("down", MatrixStruct),
        ("down_bias", _Floats),
    ]


class ExpertJobStruct(ctypes.Structure):
    _fields_ = [
        ("scratch", ctypes.c_void_p),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        ("h", _Floats),
        ("ids", _Ints),
        ("shares", _Floats),
        ("out", _Floats),
        ("rows", ctypes.c_int32),
        ("failures", ctypes.c_int32),
    ]


class StoredRowsStruct(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_int32),
        ("scale_file", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("offset", "scale_offset", "rows", "first", "step")),
    ]


class PackingStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("format", "gguf", "widen", "threads")),
        *((name, ctypes.c_int64) for name in ("stack", "rows", "cols")),
        ("part_count", ctypes.c_int32),
        ("parts", ctypes.POINTER(StoredRowsStruct)),
        ("out", ctypes.c_void_p),
    ]


STRUCTS = (
    MatrixStruct, LayerStruct, ModelStruct, StepStruct, ExpertsStruct, StoredRowsStruct, PackingStruct, ExpertJobStruct,
)  # fmt: skip


# ---- which library ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Library:
    instructions: str  # the set it was built for
    path: Path
    module: str  # hash of the file, which the record knows it by
    calls: Any


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The CPU's features by Linux's names; on macOS, the ones that an instruction set needs, translated."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    except OSError:
        pass
    if platform.system() == "Darwin":
        flags_by_name = {"hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.arm.FEAT_I8MM": "i8mm"}
        return frozenset(flag for name, flag in flags_by_name.items() if _sysctl(name) == "1")
    return frozenset()


def _sysctl(name: str) -> str:
    try:
        result = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def usable_sets(name: str = "auto") -> list[InstructionSet]:
    """The instruction sets of this CPU, the best first, or only the one named; Unavailable if the CPU lacks it."""
    sets, flags = sets_for(), cpu_flags()
    if name == "auto":
        return [s for s in sets if s.cpu_flags <= flags]
    requested = next((s for s in sets if s.name == name), None)
    if requested is None:
        raise Unavailable(f"--cpu-instructions {name} is not for this machine ({platform.machine()})")
    missing = sorted(requested.cpu_flags - flags)
    if missing:
        raise Unavailable(f"--cpu-instructions {name} needs {', '.join(missing)}, which this CPU lacks")
    return [requested]


def open_library(name: str = "auto") -> Library:
    """The loaded library, built first if necessary; Unavailable, with every reason, if there can be none."""
    result = _library_or_reason(name)
    if isinstance(result, str):
        raise Unavailable(result)
    return result


@functools.cache  # a compiler that fails once is not asked again in this process
def _library_or_reason(name: str) -> Library | str:
    try:
        sets = usable_sets(name)
    except Unavailable as e:
        return str(e)
    reasons: dict[str, None] = {}
    for instructions in sets:
        try:
            return _load(instructions, library_file(instructions))
        except Unavailable as e:
            reasons[str(e)] = None
    return "; ".join(reasons)


def _load(instructions: InstructionSet, path: Path) -> Library:
    try:
        calls: Any = ctypes.CDLL(str(path))
    except OSError as e:
        raise Unavailable(f"{path} cannot be loaded ({e})") from None
    try:
        _declare_calls(calls)
    except AttributeError as e:
        raise Unavailable(f"{path.name} is incomplete ({e})") from None
    name = calls.hb_instruction_set().decode()
    if name != instructions.name:
        raise Unavailable(f"{path.name} was built for {name}")
    for which, struct in enumerate(STRUCTS):
        size = calls.hb_struct_size(which)
        if size != ctypes.sizeof(struct):
            raise Unavailable(
                f"{path.name} has a {struct.__name__} of {size} bytes, Python one of {ctypes.sizeof(struct)}"
            )
    return Library(name, path, file_hash(path), calls)


def _declare_calls(calls: Any) -> None:
    calls.hb_instruction_set.restype = ctypes.c_char_p
    calls.hb_struct_size.restype = ctypes.c_int64
    calls.hb_struct_size.argtypes = (ctypes.c_int32,)
    calls.hb_pool_create.restype = ctypes.c_void_p
    calls.hb_pool_create.argtypes = (ctypes.c_int32, ctypes.c_void_p)
    calls.hb_create.restype = ctypes.c_void_p
    calls.hb_create.argtypes = (
        ctypes.POINTER(ModelStruct),
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_char_p,
        ctypes.c_int64,
    )
    calls.hb_destroy.restype = None
    calls.hb_destroy.argtypes = (ctypes.c_void_p,)
    calls.hb_read.restype = ctypes.c_uint64
    calls.hb_read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    calls.hb_pack.restype = ctypes.c_int32
    calls.hb_pack.argtypes = (ctypes.POINTER(PackingStruct), ctypes.POINTER(ctypes.c_int32))
    calls.hb_run.restype = ctypes.c_int32
    calls.hb_run.argtypes = (ctypes.c_void_p, ctypes.POINTER(StepStruct), ctypes.c_char_p, ctypes.c_int64)
    calls.hb_scratch_create.restype = ctypes.c_void_p
    calls.hb_scratch_create.argtypes = (
        ctypes.POINTER(ExpertsStruct),
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_char_p,
        ctypes.c_int64,
    )
    calls.hb_scratch_destroy.restype = None
    calls.hb_scratch_destroy.argtypes = (ctypes.c_void_p,)
    calls.hb_run_experts.restype = ctypes.c_int32
    calls.hb_run_experts.argtypes = (
        ctypes.c_void_p,
        ctypes.POINTER(ExpertsStruct),
        ctypes.c_int32,
        _Floats,
        _Ints,
        _Floats,
        _Floats,
        ctypes.c_char_p,
        ctypes.c_int64,
    )
    calls.hb_run_expert_job.restype = None
    calls.hb_run_expert_job.argtypes = (ctypes.POINTER(ExpertJobStruct),)
    calls.hb_run_product.restype = ctypes.c_int32
    calls.hb_run_product.argtypes = (
        ctypes.c_void_p,
        ctypes.POINTER(MatrixStruct),
        _Floats,
        ctypes.c_int32,
        ctypes.c_int32,
        _Floats,
        _Floats,
        ctypes.c_char_p,
        ctypes.c_int64,
    )


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# ---- threads and models ----------------------------------------------------------------------------------------------

_pools: dict[tuple[str, Threads], int] = {}
_pools_lock = threading.Lock()


def pool_of(library: Library, threads: Threads) -> int:
    """The worker threads of this process; models share them, one step at a time. They live as long as the process."""
    with _pools_lock:
        key = library.module, threads
        if key not in _pools:
            cores = None if threads.cores is None else (ctypes.c_int32 * threads.count)(*threads.cores)
            handle = library.calls.hb_pool_create(threads.count, cores)
            if not handle:
                raise EngineError(f"{threads.count} threads could not be started; set fewer with --threads.")
            _pools[key] = handle
        return _pools[key]


def pool_sizes() -> list[int]:
    """The number of threads of each pool that this process has started."""
    with _pools_lock:
        return [threads.count for _, threads in _pools]


def read_memory(library: Library, threads: Threads, address: int, count: int) -> int:
    """The sum, modulo 2^64, of `count` 64-bit words, read as fast as the machine can."""
    return int(library.calls.hb_read(pool_of(library, threads), address, count))


class Instance:
    """A model bound to a pool, with memory for steps of `most_rows` rows."""

    def __init__(self, library: Library, model: ModelStruct, pool: int, most_rows: int) -> None:
        self.most_rows = most_rows
        self._calls = library.calls
        self._error = ctypes.create_string_buffer(ERROR_BYTES)
        self._handle: int | None = library.calls.hb_create(
            ctypes.byref(model), pool, most_rows, self._error, ERROR_BYTES
        )
        if not self._handle:
            text = self._error.value.decode(errors="replace")
            kind = NotEnoughMemoryError if "no memory" in text else PlanError
            raise kind(f"the CPU kernels cannot take this model: {text}")

    def run(self, step: StepStruct) -> None:
        """Waits for the step, without the interpreter's lock."""
        if self._calls.hb_run(self._handle, step, self._error, ERROR_BYTES):
            raise EngineError(f"the CPU kernels refused a step: {self._error.value.decode(errors='replace')}")

    def close(self) -> None:
        if self._handle:
            self._calls.hb_destroy(self._handle)
            self._handle = None

    __del__ = close
