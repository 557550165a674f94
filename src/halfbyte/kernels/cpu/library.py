"""The CPU kernels' library in this process: which instruction set it was built for, and its structs as ctypes see them.

`open_library` takes the best set that this CPU has, or the one that is asked for; a library whose structs have other
sizes than these mirrors, or that was built for another set than its name says, is not used. Memory stays the caller's:
whoever makes a struct keeps what it points to.
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


class Matrix(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_int32), ("reserved", ctypes.c_int32), ("rows", ctypes.c_int64), ("cols", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = [
        ("attn_norm", _Floats), ("qkv", Matrix), ("qkv_bias", _Floats), ("sinks", _Floats), ("o", Matrix),
        ("o_bias", _Floats), ("mlp_norm", _Floats), ("router", _Floats), ("router_bias", _Floats),
        ("gate_up", Matrix), ("gate_up_bias", _Floats), ("down", Matrix), ("down_bias", _Floats),
        ("sliding", ctypes.c_int32), ("kind_index", ctypes.c_int32),
    ]  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "abi", "layers", "hidden", "intermediate", "experts", "top_k", "heads", "kv_heads", "head_dim", "vocab",
            "window", "page_size", "layers_per_page", "kv_format", "embed_format", "int8_activations",
        )),
        ("norm_eps", ctypes.c_float), ("swiglu_limit", ctypes.c_float), ("swiglu_alpha", ctypes.c_float),
        ("rope_inverse", _Floats), ("rope_temperature", ctypes.c_float), ("embed", ctypes.c_void_p),
        ("layer", ctypes.POINTER(Layer)), ("final_norm", _Floats), ("lm_head", Matrix),
    ]  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int32), ("sequences", ctypes.c_int32), ("logit_count", ctypes.c_int32),
        ("max_kv_len", ctypes.c_int32), ("tokens", _Ints), ("positions", _Ints), ("query_start", _Ints),
        ("kv_lens", _Ints), ("row_sequence", _Ints), ("sliding_table", _Ints), ("full_table", _Ints),
        ("table_stride", ctypes.c_int64), ("logit_rows", _Ints), ("kv_pool", ctypes.c_void_p),
        ("pages", ctypes.c_int64), ("logits", _Floats), ("best", _Ints), ("best_logit", _Floats),
        ("tap_layers", _Ints), ("tap_count", ctypes.c_int32), ("taps", _Floats),
        ("chosen", _Ints),
    ]  # fmt: skip


class Experts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "intermediate", "experts", "top_k", "int8_activations")),
        ("swiglu_limit", ctypes.c_float), ("swiglu_alpha", ctypes.c_float), ("gate_up", Matrix),
        ("gate_up_bias", _Floats), ("down", Matrix), ("down_bias", _Floats),
    ]  # fmt: skip


class StoredRows(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_int32), ("scale_file", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("offset", "scale_offset", "rows", "first", "step")),
    ]  # fmt: skip


class Packing(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("format", "gguf", "widen", "threads")),
        *((name, ctypes.c_int64) for name in ("stack", "rows", "cols")),
        ("part_count", ctypes.c_int32), ("parts", ctypes.POINTER(StoredRows)), ("out", ctypes.c_void_p),
    ]  # fmt: skip


STRUCTS = (Matrix, Layer, Model, Step, Experts, StoredRows, Packing)


# ---- which library ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Library:
    instructions: str  # the set it was built for
    path: Path
    module: str  # hash of the file, which the record knows it by
    calls: Any


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """What the CPU can do, in Linux's words; macOS's own are translated where a set asks for them."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    except OSError:
        pass
    if platform.system() == "Darwin":
        words = {"hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.arm.FEAT_I8MM": "i8mm"}
        return frozenset(flag for name, flag in words.items() if _sysctl(name) == "1")
    return frozenset()


def _sysctl(name: str) -> str:
    try:
        asked = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def usable_sets(asked: str = "auto") -> list[InstructionSet]:
    """Those that this CPU has, the best first; the one asked for, alone. Unavailable, if that is none."""
    sets, flags = sets_for(), cpu_flags()
    if asked == "auto":
        return [s for s in sets if s.cpu_flags <= flags]
    wanted = next((s for s in sets if s.name == asked), None)
    if wanted is None:
        raise Unavailable(f"--cpu-instructions {asked} is not for this machine ({platform.machine()})")
    missing = sorted(wanted.cpu_flags - flags)
    if missing:
        raise Unavailable(f"--cpu-instructions {asked} needs {', '.join(missing)}, which this CPU has not")
    return [wanted]


def open_library(asked: str = "auto") -> Library:
    """Built if it was not; Unavailable, with every reason, where none can be."""
    found = _library_or_reason(asked)
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache  # a compiler that fails once is not asked again in this process
def _library_or_reason(asked: str) -> Library | str:
    try:
        sets = usable_sets(asked)
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
        ctypes.POINTER(Model), ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int64,
    )  # fmt: skip
    calls.hb_destroy.restype = None
    calls.hb_destroy.argtypes = (ctypes.c_void_p,)
    calls.hb_read.restype = ctypes.c_uint64
    calls.hb_read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    calls.hb_pack.restype = ctypes.c_int32
    calls.hb_pack.argtypes = (ctypes.POINTER(Packing), ctypes.POINTER(ctypes.c_int32))
    calls.hb_run.restype = ctypes.c_int32
    calls.hb_run.argtypes = (ctypes.c_void_p, ctypes.POINTER(Step), ctypes.c_char_p, ctypes.c_int64)
    calls.hb_scratch_create.restype = ctypes.c_void_p
    calls.hb_scratch_create.argtypes = (
        ctypes.POINTER(Experts), ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int64,
    )  # fmt: skip
    calls.hb_scratch_destroy.restype = None
    calls.hb_scratch_destroy.argtypes = (ctypes.c_void_p,)
    calls.hb_run_experts.restype = ctypes.c_int32
    calls.hb_run_experts.argtypes = (
        ctypes.c_void_p, ctypes.POINTER(Experts), ctypes.c_int32, _Floats, _Ints, _Floats, _Floats, ctypes.c_char_p,
        ctypes.c_int64,
    )  # fmt: skip
    calls.hb_run_product.restype = ctypes.c_int32
    calls.hb_run_product.argtypes = (
        ctypes.c_void_p, ctypes.POINTER(Matrix), _Floats, ctypes.c_int32, ctypes.c_int32, _Floats, _Floats,
        ctypes.c_char_p, ctypes.c_int64,
    )  # fmt: skip


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
            made = library.calls.hb_pool_create(threads.count, cores)
            if not made:
                raise EngineError(f"{threads.count} threads could not be started; ask for fewer with --threads.")
            _pools[key] = made
        return _pools[key]


def read_memory(library: Library, threads: Threads, address: int, words: int) -> int:
    """The sum, modulo 2^64, of so many 64-bit words, read as fast as the machine can."""
    return int(library.calls.hb_read(pool_of(library, threads), address, words))


class Instance:
    """A model bound to a pool, with memory for steps of `most_rows` rows."""

    def __init__(self, library: Library, model: Model, pool: int, most_rows: int) -> None:
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

    def run(self, step: Step) -> None:
        """Waits for the step, without the interpreter's lock."""
        if self._calls.hb_run(self._handle, step, self._error, ERROR_BYTES):
            raise EngineError(f"the CPU kernels refused a step: {self._error.value.decode(errors='replace')}")

    def close(self) -> None:
        if self._handle:
            self._calls.hb_destroy(self._handle)
            self._handle = None

    __del__ = close
