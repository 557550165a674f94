"""CUDA C++ from source to a launch: NVRTC, a cache of cubins on disk, the driver's launch with attributes.

Compiling needs cuda-bindings and NVRTC but no GPU; launching needs a GPU, and goes to torch's current stream, so a
launch can be captured in a torch CUDA graph. A cubin is cached under the hash of every source it was made from, its
options, its architecture and the compiler's version; one that was shipped for the same sources, options and
architecture (`prebuilt.py`) is used as it is and needs no compiler. A missing package is an error that says what to
install; there is no fallback.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.architectures import GPU_ARCHES, Arch
from halfbyte.errors import EngineError, PlanError, UsageError
from halfbyte.gates import cache_folder
from halfbyte.plan.launches import KernelImage, Part, launched
from halfbyte.plan.machine import arch_of_gpu
from halfbyte.plan.record import Declared, NodeKernel

INCLUDES = Path(__file__).parent / "cuda"  # sources name what they include from here
PREBUILT = Path(__file__).parent / "prebuilt"  # cubins that came with the package
SM80 = "-DHB_SM80"  # the instructions that every GPU from SM80 on has: targets without a letter (`Arch.target`)
INSTALL = "install halfbyte[gpu] (it brings cuda-bindings and NVRTC)"


@dataclass(frozen=True)
class Program:
    """A .cu file with everything it includes, and the options that make it one kernel."""

    source: Path
    entry: str
    options: tuple[str, ...] = ()
    root: Path = INCLUDES

    def files(self) -> list[Path]:
        """The source and all files that it includes, regardless of the options."""
        files, unread = {self.source}, [self.source]
        while unread:
            for name in re.findall(r'^\s*#include "([^"]+)"', unread.pop().read_text(encoding="utf-8"), re.MULTILINE):
                path = self.root / name
                if path not in files:
                    files.add(path)
                    unread.append(path)
        return sorted(files)

    def hash(self) -> str:
        """The hash of the sources alone, as receipts carry it."""
        digest = hashlib.sha256()
        for path in self.files():
            digest.update(self.include_name(path).encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    def include_name(self, path: Path) -> str:
        """A file's name as #include spells it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name


@dataclass(frozen=True, eq=False)
class Build:
    """One kernel exactly as it is compiled, launched and proved, so that the three cannot drift apart.

    Compared by identity, because a launch looks its kernel up by it: the caller must keep its builds."""

    name: str  # in a proof
    program: Program
    threads: int  # of a block
    shared: int  # bytes of dynamic shared memory
    early: bool = True  # may start while the launch before it ends: the kernel itself waits for what it reads
    cooperative: bool = False  # all blocks resident at once, or an error
    resident: bool = False  # the same of one that starts early: looked at when it is loaded
    need: tuple[str, ...] = ()  # patterns its machine code must show
    ban: str = ""  # and one it must not
    known_spills: str = ""  # functions, with | between, whose spills are known and said, not held against it,
    spill_limit: int = 0  # up to so many bytes together
    spills_on_sm80: int = 0  # bytes of any of its functions that are known where it has SM80's instructions alone
    part: Part | None = None  # what it is for, where that is the same in every phase


def compile_program(program: Program, arch: str, *, cache: Path | None = None) -> bytes:
    """The cubin of `program` for `arch` (`Arch.target`, such as sm_90a): shipped, cached, or compiled now."""
    shipped = find_prebuilt(program, arch)
    if shipped is not None:
        cubin = shipped.read_bytes()
        _compiled[program, arch] = module_hash(cubin)
        return cubin
    version = nvrtc_version()
    options = _options(program, arch)
    key = hashlib.sha256("\0".join((program.hash(), version, *options)).encode()).hexdigest()[:32]
    path = (
        cache or cache_folder("cubin")
    ) / f"{program.source.stem}-{arch}-{key}.cubin"  # with every entry of the source
    try:
        cubin = path.read_bytes()
    except FileNotFoundError:
        cubin, _ = build_program(program, arch)
        _write(path, cubin)
    _compiled[program, arch] = module_hash(cubin)
    return cubin


def prebuilt_name(program: Program, arch: str) -> str:
    """The file name of a shipped cubin. It depends on sources and options, not on the compiler."""
    key = hashlib.sha256("\0".join((program.hash(), *_options(program, arch))).encode()).hexdigest()[:32]
    return f"{program.source.stem}-{arch}-{key}.cubin"


def find_prebuilt(program: Program, arch: str) -> Path | None:
    """A prebuilt cubin from the package or from the cache of `halfbyte prebuild`; None if there is none."""
    name = prebuilt_name(program, arch)
    return next((folder / name for folder in (PREBUILT, cache_folder("prebuilt")) if (folder / name).is_file()), None)


def build_program(program: Program, arch: str, *more: str) -> tuple[bytes, str]:
    """The cubin, made now, and the compiler's log; `more`: further options."""
    nvrtc = _nvrtc()
    texts = {path: _for_arch(path.read_bytes(), arch) for path in program.files()}
    source = texts.pop(program.source)
    names, bodies = [program.include_name(path).encode() for path in texts], list(texts.values())
    created = nvrtc.nvrtcCreateProgram(source, program.source.name.encode(), len(names), bodies, names)
    handle = _ok(created, "start a program")[0]
    try:
        options = (*_options(program, arch), *more, f"--include-path={program.root}")
        arguments = [o.encode() for o in options]
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(arguments), arguments)
        size = _ok(nvrtc.nvrtcGetProgramLogSize(handle), "read the log")[0]
        log = _buffer(size)
        _ok(nvrtc.nvrtcGetProgramLog(handle, log), "read the log")
        text = log.decode(errors="replace").strip("\0 \n")
        if int(status):
            name = f"{program.source.name} does not compile for {arch} with NVRTC {nvrtc_version()}"
            raise EngineError(f"{name}:\n{text}")
        size = _ok(nvrtc.nvrtcGetCUBINSize(handle), "get the cubin")[0]
        cubin = _buffer(size)
        _ok(nvrtc.nvrtcGetCUBIN(handle, cubin), "get the cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return cubin, text


def nvrtc_version() -> str:
    return "{}.{}".format(*_ok(_nvrtc().nvrtcVersion(), "ask NVRTC for its version"))


def _options(program: Program, arch: str) -> tuple[str, ...]:
    shared_cta = ("-DHB_SHARED_CTA",) if _names_shared_cta(arch) else ()  # what _for_arch did, for the cache's key
    sm80 = () if arch.endswith("a") else (SM80,)
    return (f"--gpu-architecture={arch}", "--std=c++17", "-default-device", *shared_cta, *sm80, *program.options)


def _for_arch(text: bytes, arch: str) -> bytes:
    """A source as this architecture wants it.

    Kernels name the target of a copy shared::cluster, of which shared::cta is a part: older compilers know no other
    name. To SM90 both are the same instruction. For SM12x the compiler calls a routine of the driver around every copy
    to shared::cluster, and the driver sets gigabytes aside for it (seen on RTX 5090: tilelang #2052)."""
    if not _names_shared_cta(arch):
        return text
    return re.sub(rb"shared::cluster\.global(?![^\n]*multicast)", b"shared::cta.global", text)


def _names_shared_cta(target: str) -> bool:
    return any(arch.target == target and "shared_cta_copies" in arch.features for arch in GPU_ARCHES.values())


def _buffer(size: int) -> bytes:
    """Bytes that NVRTC may write into. Python has only one object for each single byte: those must not be lent out."""
    return bytes(max(size, 2))


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically. A cache that cannot be written only costs time, so errors are ignored."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(data)
        os.replace(f.name, path)
    except OSError:
        return


def module_hash(binary: bytes) -> str:
    """The hash that identifies a loaded binary in the record: entry names alone cannot tell two builds apart."""
    return hashlib.sha256(binary).hexdigest()[:16]


# Handle -> hash of every binary that was loaded here, ours and Triton's; by module and by function.
loaded_modules: dict[int, str] = {}
loaded_functions: dict[int, str] = {}
host_functions: dict[int, NodeKernel] = {}  # by address: native code that a stream calls on the host
_compiled: dict[tuple[Program, str], str] = {}  # program and architecture -> hash of what the compiler gave


def remember_loaded(image: KernelImage, module: int, function: int) -> None:
    """Remember the handles of a binary, to identify graph nodes. Modules stay loaded, so handles stay unique."""
    loaded_modules[module] = loaded_functions[function] = image.module


def declared_kernels(programs: Iterable[Program], arch: Arch) -> list[Declared]:
    """The entries of these programs with the hashes of their binaries compiled in this process."""
    target = arch.target
    hashes: dict[str, set[str]] = {}
    for program in programs:
        hashes.setdefault(program.entry, set()).update(filter(None, (_compiled.get((program, target)),)))
    return [Declared(entry, frozenset(modules)) for entry, modules in hashes.items()]


_Pointers = ctypes.c_void_p * 1


class Kernel:
    """A loaded entry point. `shared` is the dynamic shared memory of every launch; `part` as a `Build` has it."""

    def __init__(self, cubin: bytes, entry: str, shared: int, part: Part | None = None) -> None:
        driver = _driver()
        torch.cuda.current_stream()  # the context torch uses, made current
        self._image = ctypes.create_string_buffer(cubin, len(cubin))
        module = _ok(driver.cuModuleLoadData(ctypes.addressof(self._image)), f"load {entry}")[0]
        self._function = _ok(driver.cuModuleGetFunction(module, entry.encode()), f"find {entry}")[0]
        self._module, self._shared, self._entry = module, shared, entry
        self.image = KernelImage(entry, module_hash(cubin), part=part)
        remember_loaded(self.image, int(module), int(self._function))
        self._configs: dict[tuple[int, int, int, bool, bool], Any] = {}
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _ok(driver.cuFuncSetAttribute(self._function, limit, shared), f"give {entry} {shared} bytes of shared memory")

    def blocks_at_once(self, threads: int) -> int:
        """How many of its blocks one multiprocessor can hold."""
        driver = _driver()
        occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, self._shared)
        return int(_ok(occupancy, f"ask how many blocks of {self._entry} a multiprocessor holds")[0])

    def launch(
        self, grid: int, block: int, argument: ctypes.Structure, *, cooperative: bool = False, early: bool = False
    ) -> None:
        """One struct by value. `cooperative`: all blocks resident or an error; `early`: dependent launch."""
        # torch.cuda.current_stream() takes as long as the launch
        stream: int = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        config = self._config(stream, block, cooperative, early)
        config.gridDimX = grid
        pointers = _Pointers(ctypes.addressof(argument))
        status = _driver().cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0)
        if int(status[0]):
            _ok(status, f"launch {self._entry}")
        launched(self.image)

    def _config(self, stream: int, block: int, cooperative: bool, early: bool) -> Any:
        """All of a launch but its grid. Made once for every thread: it takes longer than the launch."""
        key = threading.get_ident(), stream, block, cooperative, early
        if config := self._configs.get(key):
            return config
        driver = _driver()
        config = driver.CUlaunchConfig()
        config.hStream = driver.CUstream(stream)
        config.gridDimY, config.gridDimZ = 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = self._shared
        attributes: list[Any] = []
        if cooperative:
            a = driver.CUlaunchAttribute()
            a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            a.value.cooperative = 1
            attributes.append(a)
        if early:
            a = driver.CUlaunchAttribute()
            a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            a.value.programmaticStreamSerializationAllowed = 1
            attributes.append(a)
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._configs[key] = config
        return config


def driver_version() -> str:
    """The driver's version from NVML, as nvidia-smi prints it; without NVML, the CUDA version that it supports."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # not installed, or no NVML beside the driver
        return f"CUDA {_ok(_driver().cuDriverGetVersion(), 'ask the driver for its version')[0]}"


def shared_by_mps() -> bool:
    """Whether kernels of other processes may run beside this one's at the same moment."""
    driver = _driver()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    device = _ok(driver.cuDeviceGet(torch.cuda.current_device()), "find the device")[0]
    return bool(_ok(driver.cuDeviceGetAttribute(attribute, device), "ask whether MPS shares the device")[0])


def current_arch() -> Arch:
    """The GPU that kernels are bound for."""
    return arch_of_gpu(torch.cuda.get_device_capability())


Map = ctypes.Array[ctypes.c_uint64]  # the copy engine's view of a matrix, in the first bytes of a kernel's argument


def tensor_map(rows: torch.Tensor, box: tuple[int, int]) -> Map:
    """How the copy engine sees a matrix of bf16 rows of 128 bytes: in pieces of `box`, swizzled as wgmma reads them."""
    return _encode("BFLOAT16", rows.data_ptr(), (rows.shape[0], rows.shape[1]), rows.stride(0) * 2, box, "128B")


def byte_map(data: torch.Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
    """A map of plain bytes in rows of `row_bytes`; `box`: (rows, bytes). Bytes past the end of a row read as 0."""
    assert row_bytes % 16 == 0
    assert data.is_contiguous()
    rows = data.numel() * data.element_size() // row_bytes
    return _encode("INT64", data.data_ptr(), (rows, row_bytes // 8), row_bytes, (box[0], box[1] // 8), "NONE")


def _encode(kind: str, address: int, size: tuple[int, int], stride: int, box: tuple[int, int], swizzle: str) -> Map:
    driver = _driver()
    encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        2,
        address,
        [driver.cuuint64_t(size[1]), driver.cuuint64_t(size[0])],
        [driver.cuuint64_t(stride)],
        [driver.cuuint32_t(box[1]), driver.cuuint32_t(box[0])],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    view = (ctypes.c_uint64 * 16)()
    ctypes.memmove(view, _ok(encoded, "map a matrix for the copy engine")[0].getPtr(), 128)
    return view


def _ok(result: Sequence[Any], action: str) -> tuple[Any, ...]:
    status, *values = result
    if int(status):
        raise EngineError(f"CUDA could not {action}: {status.name if hasattr(status, 'name') else status}.")
    return tuple(values)


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise PlanError(f"the CUDA kernels need cuda-bindings, which is not installed; {INSTALL}.") from None
    try:
        nvrtc.nvrtcVersion()
    except Exception as e:  # the loader has exceptions of its own, none of them exported
        raise UsageError(f"NVRTC cannot be loaded ({str(e).splitlines()[0]}); {INSTALL}.") from None
    return nvrtc


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise PlanError(f"the CUDA kernels need cuda-bindings, which is not installed; {INSTALL}.") from None
    return driver


def nvrtc_available() -> str | None:
    """None, or the reason why nothing can be compiled here."""
    try:
        _nvrtc()
    except (PlanError, UsageError) as e:
        return str(e)
    return None
