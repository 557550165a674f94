"""The GPU, its driver and the CUDA that torch and Triton bring.

The facts come from nvidia-smi, which every driver installs, and from torch in a child process. A clock is judged only
while the GPU is busy: an idle GPU lowers its clock on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfbyte.architectures import GPU_ARCHES, refusal_of
from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.known_bad import KNOWN_BAD
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import GPU_QUERY, MIG_QUERY, PROCESSES_QUERY, driver_cuda, gib, gpus, number, version

TRITONS_PTXAS = (12, 8)  # every Triton that halfbyte runs with brings this one or a later one
ARCHES_BY_CAPABILITY = {arch.capability: arch for arch in GPU_ARCHES.values() if arch.capability is not None}
BUSY = 50  # per cent of utilisation above which the clock is meaningful
# NVML's bits for a clock that is lower than requested. Idle (1), application clocks (2), the power cap (4) and sync
# boost (0x10) are not defects.
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
DEVICES = "/proc/driver/nvidia/gpus"
MODULE = "/proc/driver/nvidia/version"
MPS_FOLDER = "/tmp/nvidia-mps"  # where its daemon listens, unless CUDA_MPS_PIPE_DIRECTORY names another folder


@check("gpu.visible", "error", "a GPU that the kernel knows but nvidia-smi or this container does not see")
def visible(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if gpus(machine):
        return
    answer, there = machine.command(GPU_QUERY), machine.folder(DEVICES)
    if answer is not None and answer["status"] != 0:
        first = next(iter(str(answer["output"]).strip().splitlines()), "no message")
        yield Finding(
            "error",
            f"nvidia-smi ends with {answer['status']}: {first}",
            "the driver's kernel module is not loaded or does not match its libraries: reboot, or reinstall the driver",
            ("sudo modprobe nvidia", "sudo dmesg | grep -i nvrm | tail"),
        )
    elif there:
        yield Finding(
            "error",
            f"the kernel knows {len(there)} NVIDIA GPU(s), but nvidia-smi is missing: this container was started "
            "without the GPU",
            "start the container with the GPU",
            ("docker run --gpus all …",),
        )
    else:
        yield Finding("note", "no NVIDIA GPU: the CPU kernels will serve", "nothing to do if this is intended")


@check("gpu.architecture", "error", "whether halfbyte has kernels for the compute capability")
def architecture(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        reason = None if gpu.capability is None else refusal_of(gpu.capability)
        if gpu.capability is not None and reason is not None:
            yield Finding(
                "error",
                f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}: {reason}",
                "serve from the CPU with --device cpu, or use another GPU",
            )


@check("gpu.modules", "error", "the open kernel modules, which Blackwell needs")
def modules(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    version_line = machine.file(MODULE) or ""
    blackwell = [g for g in gpus(machine) if g.capability is not None and g.capability >= (10, 0)]
    if blackwell and "NVRM" in version_line and "Open Kernel Module" not in version_line:
        yield Finding(
            "error",
            f"{blackwell[0].name} runs on the proprietary kernel modules ({version_line.splitlines()[0].strip()}); "
            "Blackwell is supported by the open ones only",
            "install the open modules of the same driver",
            (f"sudo apt install nvidia-driver-{blackwell[0].driver.split('.')[0]}-open && sudo reboot",),
        )


@check("gpu.clocks", "error", "an SM clock below half of its maximum while the GPU is busy")
def clocks(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        if gpu.mhz is None or gpu.mhz_most is None or (gpu.busy or 0) < BUSY or gpu.mhz >= gpu.mhz_most / 2:
            continue
        spark = "GB10" in gpu.name
        yield Finding(
            "error",
            f"{gpu.name} is {gpu.busy:.0f} % busy at {gpu.mhz:.0f} of {gpu.mhz_most:.0f} MHz"
            + ("" if gpu.watts is None else f" and {gpu.watts:.0f} W"),
            "shut down, unplug the power cord for a minute, and use the original power supply: a restart alone does "
            "not end this state of GB10"
            if spark
            else "check for a locked clock, heat or an unplugged power cable",
            ("sudo nvidia-smi -rgc", "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER"),
        )


@check("gpu.throttled", "warning", "whether the driver reports that heat or power lowers the clock")
def throttled(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        reasons = [text for bit, text in SLOWDOWNS.items() if gpu.reasons & bit]
        if reasons:
            heat = "" if gpu.celsius is None else f" at {gpu.celsius:.0f} °C"
            yield Finding(
                "warning",
                f"{gpu.name} is slowed down{heat}: {', '.join(reasons)}",
                "improve the cooling, check the fan and the power cable; a lower stable clock beats one that drops",
                ("nvidia-smi -q -d PERFORMANCE,TEMPERATURE",),
            )


@check("gpu.power-limit", "warning", "a power limit below the board's default")
def power_limit(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        if gpu.limit_watts and gpu.limit_watts_default and gpu.limit_watts < 0.98 * gpu.limit_watts_default:
            yield Finding(
                "warning",
                f"{gpu.name} is limited to {gpu.limit_watts:.0f} W; its default is {gpu.limit_watts_default:.0f} W",
                "restore the default, unless the limit was lowered on purpose",
                (f"sudo nvidia-smi -pl {gpu.limit_watts_default:.0f}",),
            )


@check("gpu.mode", "error", "a compute mode that prohibits computing, persistence mode that is off")
def mode(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        if gpu.compute_mode == "Prohibited":
            yield Finding(
                "error", f"{gpu.name} is in compute mode Prohibited", "set it to Default", ("sudo nvidia-smi -c 0",)
            )
        if gpu.persistence == "Disabled":
            yield Finding(
                "note",
                f"{gpu.name} is not in persistence mode: the first start after an idle period takes seconds longer",
                "switch it on",
                ("sudo nvidia-smi -pm 1",),
            )


@check("gpu.partitioned", "warning", "a GPU that is divided by MIG, or shared by MPS")
def partitioned(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    """Some kernels keep one block on every multiprocessor, and these wait for each other: all must run at once."""
    cards, variables = gpus(machine), machine.variables()
    if not cards:
        return
    modes = [line.strip() for line in machine.output(MIG_QUERY).splitlines()]
    named = "MIG-" in variables.get("CUDA_VISIBLE_DEVICES", "") + variables.get("NVIDIA_VISIBLE_DEVICES", "")
    for gpu, mode in zip(cards, [*modes, *[""] * len(cards)]):
        if mode == "Enabled" or (named and gpu is cards[0]):
            yield Finding(
                "warning",
                f"{gpu.name} is divided (MIG): a program has a part of its multiprocessors, bandwidth and memory, and "
                "figures for the whole GPU do not hold",
                "give halfbyte the whole GPU",
                ("sudo nvidia-smi -mig 0",),
            )
    if "CUDA_MPS_PIPE_DIRECTORY" in variables or "control" in machine.folder(MPS_FOLDER):
        yield Finding(
            "warning",
            "programs share this GPU by MPS, where the CUDA kernels refuse to start: their blocks wait for each other, "
            "and another program's kernel can keep some of them from starting",
            "end MPS, or use the Triton kernels (--moe-kernel triton --linear-kernel triton --attention triton)",
            ("echo quit | nvidia-cuda-mps-control",),
        )


@check("gpu.others", "warning", "other processes on the GPU, and orphaned engine processes")
def others(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    rows = [line.split(",") for line in machine.output(PROCESSES_QUERY).splitlines() if "," in line]
    engines = {p["pid"]: p for p in machine.ask("processes") or () if not p["zombie"]}
    for pid, used in rows:
        process = engines.get(int(pid)) if pid.strip().isdigit() else None
        size = number(used)
        memory = "" if size is None else f" with {gib(size * 2**20)}"
        if process is not None and process["parent"] == 1 and process["name"] != "halfbyte":
            yield Finding(
                "warning",
                f"{process['name']} (pid {pid.strip()}) holds the GPU{memory} and its parent is gone",
                "end it if it is not in use",
                (f"kill {pid.strip()}",),
            )
        elif process is None or process["name"] != "halfbyte":
            name = process["name"] if process else "a process"
            yield Finding(
                "note", f"{name} (pid {pid.strip()}) is on the GPU{memory}", "end it if its memory is needed", ()
            )


@check("gpu.xid", "warning", "the driver's errors (Xid) in the kernel's log")
def xid(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    lines = [line for line in machine.ask("kernel_log") or () if "Xid" in line]
    if lines:
        yield Finding(
            "warning",
            f"{len(lines)} Xid errors since boot, the last: {lines[-1].strip()}",
            "look the number up in NVIDIA's list of Xid errors; after 48, 79, 94 or 95 restart the machine",
            ("sudo dmesg -T | grep Xid",),
        )


@check("cuda.driver", "error", "whether the driver is new enough for the GPU and for torch's CUDA")
def driver(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    cards, torch = gpus(machine), machine.ask("torch") or {}
    if not cards:
        return
    gpu, most, built = cards[0], driver_cuda(machine), version(torch.get("cuda"))
    if most and built and built[0] > most[0]:
        yield Finding(
            "error",
            f"driver {gpu.driver} runs CUDA up to {_dotted(most)}, torch {torch['version']} was built with "
            f"{torch['cuda']}",
            "install a newer driver, or a torch for this one",
            ("sudo apt install nvidia-driver-580-open && sudo reboot",),
        )
    arch = ARCHES_BY_CAPABILITY.get(gpu.capability) if gpu.capability is not None else None
    if arch is None:
        return
    if version(gpu.driver)[:1] < (arch.oldest_driver,):
        yield Finding(
            "error",
            f"{gpu.name} has driver {gpu.driver}; it needs the {arch.oldest_driver} series or a later one",
            "install it",
            (f"sudo apt install nvidia-driver-{arch.oldest_driver}-open && sudo reboot",),
        )
    if built and built < arch.oldest_torch_cuda:
        needed = _dotted(arch.oldest_torch_cuda)
        yield Finding(
            "error",
            f"torch {torch['version']} was built with CUDA {torch['cuda']}, which has no code for {gpu.name}",
            f"install a torch that was built with CUDA {needed} or later",
            ("pip install --upgrade torch",),
        )


@check("cuda.known-bad", "warning", "kernels and drivers that others reported as bad for this GPU")
def known_bad(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    kernel = str((machine.ask("system") or {}).get("kernel", ""))
    for gpu in gpus(machine)[:1]:
        versions = {"kernel": kernel, "driver": gpu.driver}
        for bad in KNOWN_BAD:
            if bad.applies(gpu.name, versions):
                yield Finding(
                    "warning",
                    f"{bad.component} {versions[bad.component]} on {gpu.name}: others report {bad.symptom} "
                    f"({bad.source})",
                    bad.fix,
                    bad.commands,
                )


@check("cuda.torch", "error", "a torch that does not load, or that does not see the GPU")
def torch(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    build = machine.ask("torch") or {}
    if "error" in build:
        yield Finding("error", f"torch does not load: {build['error']}", "install it again", ("pip install torch",))
    elif gpus(machine) and not build.get("available"):
        built = f"for CUDA {build['cuda']}" if build.get("cuda") else "without CUDA"
        yield Finding(
            "error",
            f"nvidia-smi sees {gpus(machine)[0].name}, but torch {build.get('version')} (built {built}) sees no GPU",
            "install a torch with CUDA, or start the container with the GPU",
            ("pip install --force-reinstall torch",),
        )


@check("cuda.packages", "error", "the packages that GPU kernels need")
def packages(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    missing = [name for name in ("cuda-bindings", "triton") if name not in machine.packages()]
    if gpus(machine) and missing:
        yield Finding(
            "error", f"{' and '.join(missing)} is not installed", "install the extra", ("pip install 'halfbyte[gpu]'",)
        )


@check("cuda.ptxas", "error", "whether the ptxas that Triton or FlashInfer calls knows this GPU")
def ptxas(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    archs = [ARCHES_BY_CAPABILITY[gpu.capability] for gpu in gpus(machine) if gpu.capability in ARCHES_BY_CAPABILITY]
    arch = max(archs, key=lambda arch: arch.oldest_ptxas, default=None)
    if arch is None or arch.oldest_ptxas <= TRITONS_PTXAS:
        return
    releases = {"Triton's ptxas": machine.ask("ptxas")}
    if "flashinfer-python" in machine.packages():
        release_line = re.search(r"release (\d+\.\d+)", machine.output("nvcc --version"))
        releases["nvcc, which FlashInfer calls,"] = release_line[1] if release_line else None
    for name, release in releases.items():
        if release is not None and version(release) < arch.oldest_ptxas:
            yield Finding(
                "error",
                f"{name} is {release} and does not know {arch.target}, which needs {_dotted(arch.oldest_ptxas)}",
                "install the ptxas of CUDA 13 and set its path",
                ("export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas",),
            )


@check("cuda.suffix", "error", "variables whose architectures lack the suffix (a or f) that FP4 instructions need")
def suffix(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST"):
        listed = re.split(r"[\s;,]+", machine.variables().get(name, ""))
        bare = [arch for arch in listed if re.fullmatch(r"(12|10)\.\d", arch)]
        if bare:
            right = " ".join(f"{arch}a" if arch in bare else arch for arch in listed)
            yield Finding(
                "error" if name.startswith("FLASHINFER") else "warning",
                f"{name} is {' '.join(listed)!r}: without a suffix ptxas refuses cvt.e2m1x2 or the code emulates FP4",
                "name the architecture with its suffix, and clear what was compiled without it",
                (f"export {name}={right!r}", "halfbyte cache clear flashinfer --stale"),
            )


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
