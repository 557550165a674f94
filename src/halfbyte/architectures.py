"""The table of architectures: what each machine is, what its instructions can do, and the GPUs that have it.

A record here is all that `doctor`, `explain`, `prebuild`, the cache, the roofline and the choice of kernels know about
an architecture. Kernels ask for a family or a feature, never for a list of names, so that a new member of a family is
one record. docs/add-an-architecture.md lists what else a new one needs. This module imports neither torch nor CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from halfbyte.errors import PlanError, UsageError

Regime = Literal["decode", "batch", "prefill", "long"]
REGIMES: tuple[Regime, ...] = ("decode", "batch", "prefill", "long")

# Members of a family differ in size; kernels and tiles are written for a family.
Family = Literal["cpu", "sm8x", "sm90", "sm10x", "sm12x"]
Feature = Literal[
    "e4m3",  # conversions from and to E4M3
    "bulk_copies",  # a copy engine, and barriers that count its bytes; without it threads copy sixteen bytes each
    "early_launches",  # a kernel may start while the one before it ends
    "wgmma",  # products of a warpgroup from shared memory
    "tcgen05",  # products in tensor memory
    "block_scaled",  # products of FP4 and FP8 operands with a scale for each group of 32
    "block_scaled_mma_sync",  # the same as an instruction of a warp
    "shared_cta_copies",  # bulk copies must name shared::cta: see kernels/launch.py `_for_arch`
]
_AMPERE = frozenset[Feature]()
_ADA = frozenset[Feature]({"e4m3"})
_FROM_HOPPER_ON = frozenset[Feature]({"e4m3", "bulk_copies", "early_launches"})
_HOPPER = _FROM_HOPPER_ON | frozenset[Feature]({"wgmma"})
_BLACKWELL = _FROM_HOPPER_ON | frozenset[Feature]({"tcgen05", "block_scaled"})
_SMALL_BLACKWELL = _FROM_HOPPER_ON | frozenset[Feature]({"block_scaled", "block_scaled_mma_sync", "shared_cta_copies"})


@dataclass(frozen=True)
class RegimeLimits:
    """Where one regime's kernels become faster than another's: rows of a step, a property of the machine."""

    decode: int  # the most rows of a decode step
    batch: int  # the most rows of a batch
    long: int  # the fewest rows of a long prompt
    source: str  # where the numbers come from

    def regime(self, rows: int) -> Regime:
        if rows > self.batch:
            return "prefill" if rows < self.long else "long"
        return "decode" if rows <= self.decode else "batch"

    def range(self, regime: Regime) -> str:
        """The range of rows as text."""
        return {
            "decode": f"1–{self.decode} rows",
            "batch": f"{self.decode + 1}–{self.batch} rows",
            "prefill": f"{self.batch + 1}–{self.long - 1} rows",
            "long": f"{self.long} rows and more",
        }[regime]


@dataclass(frozen=True)
class Gpu:
    """`read` is bytes/s: measured where `measured` says so, else the vendor's figure. FLOP/s are dense."""

    name: str
    arch: str
    read: float
    measured: bool
    bf16: float
    fp8: float
    memory: float
    note: str = ""
    paper_read: float = 0.0  # the vendor's bytes/s
    multiprocessors: int = 0  # 0, here and below: not known
    ghz: float = 0.0  # clock under load, as published
    cache: float = 0.0  # bytes of L2
    cache_read: float = 0.0  # bytes/s of L2
    product_reads: tuple[float, float] = (0.0, 0.0)  # bytes/s of others' matrix products, least and best; 0: no report
    unified: bool = False  # its memory is the machine's
    other_names: tuple[str, ...] = ()  # what people and drivers call it, in small letters and digits

    @property
    def memory_text(self) -> str:
        """The size as it is printed on the box: GiB are called GB there."""
        unit = 1 << 30 if self.memory % (1 << 30) == 0 else 1e9
        return f"{self.memory / unit:.0f} GB"


@dataclass(frozen=True)
class Arch:
    """An architecture that kernels run on. `capability` is None on a CPU."""

    name: str
    capability: tuple[int, int] | None = None
    shared_memory: int = 0  # bytes one block may use
    limits: RegimeLimits = field(kw_only=True)
    family: Family = field(kw_only=True)
    features: frozenset[Feature] = frozenset()
    # An architecture that differs in size, not in instructions: what is shown on one counts for the other if the
    # machine code is equal (`explain --prove` compares it).
    sibling: str = ""
    has_run: bool = False  # the kernels have run on such a machine, not only been compiled for it
    partly_run: str = ""  # where it has not: what of them has run elsewhere
    oldest_ptxas: tuple[int, int] = (0, 0)  # the first CUDA release whose ptxas knows `target`
    oldest_torch_cuda: tuple[int, int] = (0, 0)  # the first CUDA whose builds of torch have code for it
    oldest_driver: int = 0  # the first driver series
    name_for_old_triton: str = ""  # before 3.8 Triton finds block-scaled products only under this name
    compiled_for: str = ""  # the target of another GPU that runs this architecture's instructions (see `restricted`)

    def __hash__(self) -> int:
        return hash(self.name)  # names are unique, and launches look kernels up by architecture

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    @property
    def target(self) -> str:
        """The name that compilers use. With the letter it has the instructions of this architecture alone; without, the
        CUDA kernels are compiled from the instructions that every GPU from SM80 on has (`launch.compile_program`)."""
        letter = "a" if "bulk_copies" in self.features else ""
        return self.compiled_for or f"sm_{self.name.removeprefix('sm')}{letter}"


_H200 = RegimeLimits(
    decode=3,
    batch=64,
    long=3072,
    source="measured on an H200: up to 3 rows the decode step is faster than the batch kernels; from 3072 rows on fp8 "
    "activations are 11 % faster, at 2048 rows 2 % slower (docs/LOG.md)",
)
_CARRIED_OVER = replace(_H200, source="an H200's, carried over: not measured on this architecture")
_CPU = RegimeLimits(
    decode=8,
    batch=64,
    long=4096,
    source="names only: on a CPU one call runs a step of any number of rows",
)
_PRODUCTS_ON_H200 = "their bf16 products on an H200 (bench/kernels/sm12x.py)"

ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("cpu", limits=_CPU, family="cpu", has_run=True),
        Arch("sm80", (8, 0), 166_912, limits=_CARRIED_OVER, family="sm8x", features=_AMPERE, oldest_ptxas=(11, 0)),
        Arch("sm86", (8, 6), 101_376, limits=_CARRIED_OVER, family="sm8x", features=_AMPERE, oldest_ptxas=(11, 1)),
        Arch("sm89", (8, 9), 101_376, limits=_CARRIED_OVER, family="sm8x", features=_ADA, oldest_ptxas=(11, 8)),
        Arch("sm90", (9, 0), 232_448, limits=_H200, family="sm90", features=_HOPPER, has_run=True,
             oldest_ptxas=(12, 0)),
        Arch("sm100", (10, 0), 232_448, limits=_CARRIED_OVER, family="sm10x", features=_BLACKWELL,
             oldest_ptxas=(12, 8), oldest_torch_cuda=(12, 8)),
        Arch("sm103", (10, 3), 232_448, limits=_CARRIED_OVER, family="sm10x", features=_BLACKWELL,
             oldest_ptxas=(12, 9), oldest_torch_cuda=(12, 9)),
        Arch("sm120", (12, 0), 101_376, limits=_CARRIED_OVER, family="sm12x", features=_SMALL_BLACKWELL,
             sibling="sm121", partly_run=_PRODUCTS_ON_H200, oldest_ptxas=(12, 8), oldest_torch_cuda=(12, 8)),
        Arch("sm121", (12, 1), 101_376, limits=_CARRIED_OVER, family="sm12x", features=_SMALL_BLACKWELL,
             sibling="sm120", partly_run=_PRODUCTS_ON_H200, oldest_ptxas=(12, 9), oldest_torch_cuda=(12, 8),
             oldest_driver=580, name_for_old_triton="sm120"),
    )
}  # fmt: skip
GPU_ARCHES: dict[str, Arch] = {name: arch for name, arch in ARCHES.items() if arch.is_gpu}
OLDER: dict[str, Arch] = {name: arch for name, arch in GPU_ARCHES.items() if "bulk_copies" not in arch.features}
# Read bandwidths and matrix rates; `note` says where each comes from. Variants with another memory (laptops, PCIe,
# NVL, D) are none of these. `fp8` is bf16's rate where a GPU has no FP8 products. Cards from RTX 30 and 40 on have the
# memory that their driver reports, with ECC on where that is how they are sold.
GPUS: dict[str, Gpu] = {
    "h200": Gpu(
        "H200", "sm90", 4.5e12, True, 790e12, 1580e12, 141e9, "reads measured, 4.8 TB/s on paper", 4.8e12, 132, 1.98
    ),
    "h100": Gpu(
        "H100 SXM", "sm90", 3.35e12, False, 790e12, 1580e12, 80e9, "paper bandwidth, H200's matrix rate", 3.35e12, 132,
        1.98, other_names=("h100sxm", "h100sxm5", "h10080gbhbm3"),
    ),
    "a100": Gpu(
        "A100 SXM 80 GB", "sm80", 2.039e12, False, 312e12, 312e12, 80 << 30, "paper; 40 MB of L2", 2.039e12, 108, 1.41,
        40e6, 5.1e12, other_names=("a100sxm", "a100sxm80gb", "a100sxm480gb"),
    ),
    "a10040": Gpu(
        "A100 SXM 40 GB", "sm80", 1.555e12, False, 312e12, 312e12, 40 << 30, "paper; 40 MB of L2", 1.555e12, 108, 1.41,
        40e6, 5.1e12, other_names=("a100sxm40gb", "a100sxm440gb"),
    ),
    "rtx3060": Gpu(
        "RTX 3060", "sm86", 360e9, False, 25e12, 25e12, 12 << 30, "paper; the one with 12 GB", 360e9, 28, 1.78, 3e6,
        other_names=("3060",),
    ),
    "rtx3090": Gpu(
        "RTX 3090", "sm86", 936e9, False, 71e12, 71e12, 24 << 30, "paper; 6 MB of L2", 936e9, 82, 1.70, 6e6, 2.3e12,
        other_names=("3090",),
    ),
    "a10": Gpu("A10", "sm86", 600e9, False, 125e12, 125e12, 23_028 << 20, "paper", 600e9, 72, 1.70, 6e6,
               other_names=("a10g",)),
    "a6000": Gpu(
        "RTX A6000", "sm86", 768e9, False, 155e12, 155e12, 48 << 30, "paper; 6 MB of L2", 768e9, 84, 1.80, 6e6, 2.5e12,
        other_names=("rtxa6000",),
    ),
    "a40": Gpu("A40", "sm86", 696e9, False, 150e12, 150e12, 46_068 << 20, "paper", 696e9, 84, 1.74, 6e6),
    "rtx4060ti": Gpu(
        "RTX 4060 Ti", "sm89", 288e9, False, 44e12, 88e12, 16 << 30, "paper; the one with 16 GB", 288e9, 34, 2.54, 32e6,
        other_names=("4060ti", "rtx4060ti16gb"),
    ),
    "rtx4080": Gpu(
        "RTX 4080", "sm89", 717e9, False, 97e12, 195e12, 16 << 30, "paper; 64 MB of L2", 717e9, 76, 2.51, 64e6,
        other_names=("4080",),
    ),
    "rtx4080s": Gpu(
        "RTX 4080 SUPER", "sm89", 736e9, False, 104e12, 209e12, 16 << 30, "paper; 64 MB of L2", 736e9, 80, 2.55, 64e6,
        other_names=("4080s", "rtx4080super", "4080super"),
    ),
    "rtx4090": Gpu(
        "RTX 4090", "sm89", 1.008e12, False, 165e12, 330e12, 24 << 30, "paper; 72 MB of L2", 1.008e12, 128, 2.52,
        72e6, 5.0e12, other_names=("4090",),
    ),
    "l4": Gpu("L4", "sm89", 300e9, False, 121e12, 242e12, 23_034 << 20, "paper", 300e9, 58, 2.04, 48e6),
    "l40s": Gpu(
        "L40S", "sm89", 864e9, False, 362e12, 733e12, 46_068 << 20, "paper; 96 MB of L2", 864e9, 142, 2.52,
        96e6, 5.5e12,
    ),
    "rtx6000ada": Gpu(
        "RTX 6000 Ada", "sm89", 960e9, False, 364e12, 728e12, 48 << 30, "paper; 96 MB of L2", 960e9, 142, 2.51, 96e6,
        other_names=("6000ada", "rtx6000adageneration"),
    ),
    "gb10": Gpu(
        "GB10 (DGX Spark)", "sm121", 232e9, True, 92e12, 184e12, 120e9,
        "reads (231-234 GB/s) and bf16 products as reported, 273 GB/s on paper; 24 MB of L2", 273e9, 48, 2.14,
        24e6, 1.0e12, (201e9, 214e9), unified=True, other_names=("spark", "dgxspark", "gb10dgxspark"),
    ),
    "rtx5090": Gpu(
        "RTX 5090", "sm120", 1.792e12, False, 210e12, 419e12, 32e9, "paper; 96 MB of L2", 1.792e12, 170, 2.41,
        96e6, 7.9e12, other_names=("5090",),
    ),
    "pro6000": Gpu(
        "RTX PRO 6000", "sm120", 1.792e12, False, 504e12, 1008e12, 96e9, "paper; 128 MB of L2", 1.792e12, 188, 2.62,
        128e6, 8.7e12,
        other_names=("6000", "rtxpro6000", "rtxpro6000blackwell", "rtxpro6000blackwellworkstationedition",
                     "rtxpro6000blackwellserveredition"),
    ),
    "b200": Gpu("B200", "sm100", 8.0e12, False, 2250e12, 4500e12, 180e9, "paper", 8.0e12, 148, 1.97),
    "b300": Gpu("B300", "sm103", 8.0e12, False, 2250e12, 4500e12, 288e9, "paper", 8.0e12, other_names=("b300sxm6ac",)),
}  # fmt: skip
_KEYS = {other: key for key, gpu in GPUS.items() for other in (key, *gpu.other_names)}


# What cannot be served, with what serves it instead. bf16 products begin with SM80.
WITHOUT_BF16 = (
    "it has no bf16 products, in which every kernel here multiplies; llama.cpp or LMDeploy serve gpt-oss on it, and "
    "--device cpu serves it from the CPU"
)


def refusal_of(capability: tuple[int, ...]) -> str | None:
    """Why no kernel runs on a GPU with this compute capability, in one clause; None where the table has it."""
    if any(arch.capability == capability for arch in GPU_ARCHES.values()):
        return None
    if capability < min(arch.capability for arch in GPU_ARCHES.values() if arch.capability is not None):
        return WITHOUT_BF16
    return f"halfbyte has kernels for {', '.join(GPU_ARCHES)}"


def arch_with(capability: tuple[int, ...]) -> Arch:
    """The architecture of a GPU with this compute capability; a PlanError where the table has none."""
    for arch in GPU_ARCHES.values():
        if arch.capability == capability:
            return arch
    name = "sm" + "".join(map(str, capability))
    raise PlanError(f"this GPU is {name}; {refusal_of(capability)}.")


def restricted(arch: Arch, to: Arch) -> Arch:
    """An older architecture (of OLDER) on a GPU of a newer one: its kernels, its sizes and its instructions alone,
    compiled for that GPU, so that what is meant for older machines can be run where none is."""
    assert arch.capability is not None
    assert to.capability is not None
    if arch.capability > to.capability or arch.shared_memory > to.shared_memory:
        raise UsageError(f"this GPU is {to.name} and cannot run what is made for {arch.name}; name an older one.")
    return replace(arch, compiled_for="sm_{}{}".format(*to.capability))


def gpu_named(text: str) -> Gpu:
    """A GPU of the table by any usual name."""
    key = "".join(c for c in text.lower() if c.isalnum()).removeprefix("nvidia").removeprefix("geforce")
    if key not in _KEYS:
        raise UsageError(f"there is no GPU {text!r} in the table; use one of {', '.join(GPUS)}.")
    return GPUS[_KEYS[key]]
