"""The GPU, its driver and the CUDA that torch and Triton bring.

Read from nvidia-smi, which every driver installs, and from a torch in a process of its own. A clock is judged only
while the GPU works: an idle one is slow on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.known_bad import KNOWN_BAD
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import (
    GPU_QUERY,
    PROCESSES_QUERY,
    driver_cuda,
    gib,
    gpus,
    number,
    version,
)

CAPABILITIES = {(9, 0): "sm90", (10, 0): "sm100", (12, 0): "sm120", (12, 1): "sm121"}
BUSY = 50  # per cent of utilisation from which a clock says something
# NVML's bits for a clock that is lower than it was asked to be. Idle (1), applications' clocks (2), the power cap (4)
# and sync boost (0x10) are no defects.
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
DEVICES = "/proc/driver/nvidia/gpus"
MODULE = "/proc/driver/nvidia/version"
OLDEST_PTXAS = (12, 9)  # the first that knows sm_121a


@check("gpu.visible", "error", "a GPU that the kernel has and nvidia-smi or this container does not see")
def visible(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if gpus(machine):
        return
    asked, there = machine.command(GPU_QUERY), machine.folder(DEVICES)
    if asked is not None and asked["status"] != 0:
        first = next(iter(str(asked["output"]).strip().splitlines()), "no message")
        yield Finding(
            "error",
            f"nvidia-smi ends with {asked['status']}: {first}",
            "the driver's module and its libraries do not fit each other or it is not loaded: reboot, or install the "
            "driver again",
            ("sudo modprobe nvidia", "sudo dmesg | grep -i nvrm | tail"),
        )
    elif there:
        yield Finding(
            "error",
            f"the kernel has {len(there)} NVIDIA GPU and nvidia-smi is not here: this container was started without it",
            "start the container with the GPU",
            ("docker run --gpus all …",),
        )
    else:
        yield Finding("note", "no NVIDIA GPU: the CPU kernels serve", "nothing, if that is what you want")


@check("gpu.architecture", "error", "the compute capability, against those that have kernels here")
def architecture(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        if gpu.capability is not None and gpu.capability not in CAPABILITIES:
            yield Finding(
                "error",
                f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}; kernels are here for "
                f"{', '.join(f'{a}.{b}' for a, b in CAPABILITIES)}",
                "serve from the CPU with --device cpu, or use another GPU",
            )


@check("gpu.modules", "error", "the open kernel modules, which Blackwell needs")
def modules(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    told = machine.file(MODULE) or ""
    blackwell = [g for g in gpus(machine) if g.capability is not None and g.capability >= (10, 0)]
    if blackwell and "NVRM" in told and "Open Kernel Module" not in told:
        yield Finding(
            "error",
            f"{blackwell[0].name} runs on the proprietary kernel modules ({told.splitlines()[0].strip()}); Blackwell "
            "is supported by the open ones only",
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
            "shut down, take the power cord out for a minute, and use the supply that came with it: a restart alone "
            "does not end this state of GB10"
            if spark
            else "look for a locked clock, heat or a power cable that is not in",
            ("sudo nvidia-smi -rgc", "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER"),
        )


@check("gpu.throttled", "warning", "the driver's own word that heat or power holds the clock down")
def throttled(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        reasons = [text for bit, text in SLOWDOWNS.items() if gpu.reasons & bit]
        if reasons:
            heat = "" if gpu.celsius is None else f" at {gpu.celsius:.0f} °C"
            yield Finding(
                "warning",
                f"{gpu.name} is slowed down{heat}: {', '.join(reasons)}",
                "give it air, look at fan and power cable; a lower clock that holds is faster than one that falls",
                ("nvidia-smi -q -d PERFORMANCE,TEMPERATURE",),
            )


@check("gpu.power-limit", "warning", "a power limit below the board's default")
def power_limit(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        if gpu.limit_watts and gpu.limit_watts_default and gpu.limit_watts < 0.98 * gpu.limit_watts_default:
            yield Finding(
                "warning",
                f"{gpu.name} may take {gpu.limit_watts:.0f} W of {gpu.limit_watts_default:.0f} W",
                "set the default again, unless somebody lowered it on purpose",
                (f"sudo nvidia-smi -pl {gpu.limit_watts_default:.0f}",),
            )


@check("gpu.mode", "error", "a compute mode that lets nobody in, persistence that is off")
def mode(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for gpu in gpus(machine):
        if gpu.compute_mode == "Prohibited":
            yield Finding(
                "error", f"{gpu.name} is in compute mode Prohibited", "set it to Default", ("sudo nvidia-smi -c 0",)
            )
        if gpu.persistence == "Disabled":
            yield Finding(
                "note",
                f"{gpu.name} is not in persistence mode: the first start after idling takes seconds longer",
                "switch it on",
                ("sudo nvidia-smi -pm 1",),
            )


@check("gpu.others", "warning", "other processes on the GPU, and orphans of engines that ended")
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
                "end it if nobody uses it",
                (f"kill {pid.strip()}",),
            )
        elif process is None or process["name"] != "halfbyte":
            name = process["name"] if process else "a process"
            yield Finding(
                "note", f"{name} (pid {pid.strip()}) is on the GPU{memory}", "end it if the memory is missing", ()
            )


@check("gpu.xid", "warning", "the driver's errors (Xid) in the kernel's log")
def xid(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    told = [line for line in machine.ask("kernel_log") or () if "Xid" in line]
    if told:
        yield Finding(
            "warning",
            f"{len(told)} Xid errors since the start, the last: {told[-1].strip()}",
            "look the number up in NVIDIA's list of Xid errors; after 48, 79, 94 or 95 restart the machine",
            ("sudo dmesg -T | grep Xid",),
        )


@check("cuda.driver", "error", "the driver, against the CUDA that torch was built with and what the GPU needs")
def driver(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found, torch = gpus(machine), machine.ask("torch") or {}
    if not found:
        return
    gpu, most, built = found[0], driver_cuda(machine), version(torch.get("cuda"))
    if most and built and built[0] > most[0]:
        yield Finding(
            "error",
            f"driver {gpu.driver} runs CUDA up to {_dotted(most)}, torch {torch['version']} was built with "
            f"{torch['cuda']}",
            "install a newer driver, or a torch for this one",
            ("sudo apt install nvidia-driver-580-open && sudo reboot",),
        )
    if gpu.capability == (12, 1) and version(gpu.driver)[:1] < (580,):
        yield Finding(
            "error",
            f"{gpu.name} has driver {gpu.driver}; it needs the 580 series or a later one",
            "install it",
            ("sudo apt install nvidia-driver-580-open && sudo reboot",),
        )
    if gpu.capability is not None and gpu.capability >= (12, 0) and built and built < (12, 8):
        yield Finding(
            "error",
            f"torch {torch['version']} was built with CUDA {torch['cuda']}, which has no code for {gpu.name}",
            "install a torch that was built with CUDA 12.8 or later (13.0 for GB10)",
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
                    f"{bad.what} {versions[bad.what]} on {gpu.name}: others report {bad.symptom} ({bad.source})",
                    bad.fix,
                    bad.commands,
                )


@check("cuda.torch", "error", "a torch that does not load, or that does not see the GPU")
def torch(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    told = machine.ask("torch") or {}
    if "error" in told:
        yield Finding("error", f"torch does not load: {told['error']}", "install it again", ("pip install torch",))
    elif gpus(machine) and not told.get("available"):
        built = f"for CUDA {told['cuda']}" if told.get("cuda") else "without CUDA"
        yield Finding(
            "error",
            f"nvidia-smi sees {gpus(machine)[0].name}, but torch {told.get('version')} (built {built}) sees no GPU",
            "install a torch with CUDA, or start the container with the GPU",
            ("pip install --force-reinstall torch",),
        )


@check("cuda.packages", "error", "packages that launching on a GPU needs")
def packages(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    missing = [name for name in ("cuda-bindings", "triton") if name not in machine.packages()]
    if gpus(machine) and missing:
        yield Finding(
            "error", f"{' and '.join(missing)} is not installed", "install the extra", ("pip install 'halfbyte[gpu]'",)
        )


@check("cuda.ptxas", "error", "the ptxas that Triton or FlashInfer would call: sm_121a needs 12.9")
def ptxas(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not any(gpu.capability == (12, 1) for gpu in gpus(machine)):
        return
    found = {"Triton's ptxas": machine.ask("ptxas")}
    if "flashinfer-python" in machine.packages():
        told = re.search(r"release (\d+\.\d+)", machine.output("nvcc --version"))
        found["nvcc, which FlashInfer calls,"] = told[1] if told else None
    for name, release in found.items():
        if release is not None and version(release) < OLDEST_PTXAS:
            yield Finding(
                "error",
                f"{name} is {release} and does not know sm_121a",
                "install CUDA 13's and name it",
                ("export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas",),
            )


@check("cuda.suffix", "error", "architectures in variables that lack the a or f which FP4 instructions need")
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
