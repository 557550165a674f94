"""Call: one kernel exactly as a phase launches it, so that running it and proving it cannot drift apart.

A call names the device function, its compile-time constants, its warps and stages, and the type of every other
argument. `launch` runs it; `kernels/prove.py` compiles it for an architecture that is not here. Under Triton's
interpreter the argument types are checked against the declared ones on every launch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.architectures import ARCHES, Arch
from halfbyte.kernels.launch import module_hash, remember_loaded
from halfbyte.plan.launches import KernelImage, Part, launched
from halfbyte.plan.machine import arch_of_gpu, instruction_set
from halfbyte.plan.record import Declared

PACKAGE = "halfbyte.kernels.triton.jit"
INTERPRETED = instruction_set() or ARCHES["sm120"]  # whose tiles run under the interpreter, on a CPU

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Loaded(NamedTuple):
    """A kernel that Triton compiled and loaded."""

    kernel: Any
    image: KernelImage

    @classmethod
    def of(cls, kernel: Any, part: Part | None) -> Loaded:
        """The kernel that Triton returned from a launch. Each is hashed once, even if its call is not kept."""
        handle = int(kernel.module)
        if handle not in _loaded:
            image = KernelImage(kernel.name, module_hash(kernel.asm["cubin"]), part=part)
            remember_loaded(image, handle, int(kernel.function))
            _loaded[handle] = cls(kernel, image)
        return _loaded[handle]


_loaded: dict[int, Loaded] = {}  # by the driver's handle of the module; kept, so that no other gets the same handle
_compiled: dict[str, set[str]] = {}  # function -> hashes of the binaries that Triton made of it here
_names: dict[str, str] = {}  # function -> what Triton calls its kernels, where that is another name


@functools.cache
def _interpreted(function: str, part: Part | None) -> KernelImage:
    _compiled.setdefault(function, set()).add("interpreted")
    return KernelImage(function, "interpreted", part=part)


def declared_calls(calls: Iterable[TritonCall]) -> list[Declared]:
    """The functions of these calls with the hashes of all binaries that Triton compiled here, for any shapes."""
    functions = dict.fromkeys(c.function for c in calls)
    return [Declared(_names.get(f, f), frozenset(_compiled.get(f, ()))) for f in functions]


@dataclass(frozen=True)
class TritonCall:
    """`types`: argument -> Triton type; `i32:16` is an integer known to be a multiple of 16, None an absent pointer."""

    module: str
    function: str
    types: Mapping[str, str | None]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    need: str = ""  # pattern the machine code must show
    ban: str = ""  # pattern it must not show
    options: Mapping[str, Any] = field(default_factory=dict)
    part: Part | None = None  # where it serves another kernel, in whatever phase
    compiled: dict[tuple[Any, ...], Loaded] = field(default_factory=dict, compare=False, repr=False)  # see `launch`

    @property
    def name(self) -> str:
        return f"{self.function}{''.join(f' {k}={v}' for k, v in self.constants.items() if k in _TELLING)}"

    def resolve(self) -> Any:
        return _function(self.module, self.function)

    def launch(self, grid: tuple[int, ...], device: torch.device, **args: Any) -> None:
        """Launch the kernel. A call that is kept saves Triton's lookup, which takes longer than a launch."""
        if 0 in grid:
            return
        fn = self.resolve()
        if device.type == "cpu":  # the interpreter: the only place where this runs without a GPU
            self._check(args)
        key = (device.index, *map(_told_apart, args.values()))
        if loaded := self.compiled.get(key):
            values = {**self.constants, **args}
            loaded.kernel[(*grid, 1, 1)[:3]](*(values[name] for name in fn.arg_names))
            launched(loaded.image)
            return
        kernel = fn[grid](
            **args,
            **self.constants,
            num_warps=self.warps,
            num_stages=self.stages,
            **self.options,
            **target_options(device),
        )
        if device.type == "cpu":
            launched(_interpreted(self.function, self.part))
            return
        loaded = self.compiled[key] = Loaded.of(kernel, self.part)
        _compiled.setdefault(self.function, set()).add(loaded.image.module)
        _names[self.function] = loaded.image.name
        launched(loaded.image)

    def _check(self, args: Mapping[str, Any]) -> None:
        assert set(args) == set(self.types), f"{self.function}: {set(args) ^ set(self.types)}"
        for name, value in args.items():
            declared = self.types[name]
            if isinstance(value, Tensor):
                assert declared == _TYPES[value.dtype], f"{self.function}.{name}: {value.dtype} declared {declared}"
            elif value is None:
                assert declared is None, f"{self.function}.{name}: None declared {declared}"
            elif isinstance(value, int):
                assert declared in ("i32", "i64", "i32:16", "i64:16"), (
                    f"{self.function}.{name}: int declared {declared}"
                )
                assert not declared.endswith(":16") or value % 16 == 0, f"{self.function}.{name}: {value} % 16"
            else:
                assert declared == "fp32", f"{self.function}.{name}: {type(value)} declared {declared}"


def _told_apart(value: Any) -> Any:
    """What Triton compiles another kernel for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)


_TELLING = ("XF", "WF", "BM", "BN", "BK", "WINDOW", "SPLITS", "SWAP", "KV")


@functools.cache
def _function(module: str, function: str) -> Any:
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)


@functools.cache
def triton_version() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def arch_of(device: torch.device) -> Arch:
    """The architecture to choose tiles for. The interpreter takes those of SM120, or of what it is restricted to."""
    return INTERPRETED if device.type == "cpu" else arch_of_gpu(torch.cuda.get_device_capability(device))


@functools.cache
def target_options(device: torch.device) -> dict[str, Any]:
    return {} if device.type == "cpu" else compile_options(arch_of(device))


def compile_options(arch: Arch) -> dict[str, Any]:
    """The name that an older Triton needs, or that an older instruction set on a newer GPU has, changes which products
    and copies it finds; the target stays the GPU's own.

    Multiply-add fusion is asked for by name, because the default differs between versions."""
    old_triton = arch.name_for_old_triton if triton_version() < (3, 8) else ""
    name = arch.name if arch.compiled_for else old_triton
    return {"enable_fp_fusion": True} | ({"arch": name} if name else {})


def type_of(dtype: torch.dtype) -> str:
    return _TYPES[dtype]


def multiple(value: int) -> str:
    """The type of an integer argument, as Triton specialises it."""
    return "i32:16" if value % 16 == 0 else "i32"


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
