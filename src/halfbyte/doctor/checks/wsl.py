"""Windows: halfbyte runs there inside WSL2, which has the GPU from Windows' own driver.

The kernel's release says whether this is WSL. The driver's libraries come from Windows, under /usr/lib/wsl/lib; a Linux
driver installed beside them hides them. Windows' drives are mounted through 9p, which reads several times slower than
WSL's own file system, and the virtual machine has half of the machine's memory unless .wslconfig says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.doctor.checks.storage import cache_root, models_root
from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import GIB, gib, meminfo

LIBRARIES = "/usr/lib/wsl/lib"
LEAST_MEMORY = 8 * GIB
WINDOWS_FILES = ("9p", "v9fs", "drvfs")


def wsl(machine: Machine) -> str:
    """The release of WSL's kernel; empty elsewhere."""
    kernel = str((machine.ask("system") or {}).get("kernel", ""))
    return kernel if "microsoft" in kernel.lower() else ""


@check("wsl.version", "error", "WSL1, which has no GPU")
def version(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    kernel = wsl(machine)
    if kernel and "wsl2" not in kernel.lower() and "microsoft-standard" not in kernel.lower():
        yield Finding(
            "error",
            f"this is WSL1 (kernel {kernel}): only WSL2 passes the GPU on",
            "convert the distribution, from PowerShell",
            ("wsl.exe --set-version DISTRIBUTION 2",),
        )


@check("wsl.driver", "error", "Windows' driver inside WSL2: its libraries, and a Linux driver that hides them")
def driver(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not wsl(machine):
        return
    tool, libraries = machine.program("nvidia-smi"), machine.folder(LIBRARIES)
    if "libcuda.so.1" not in libraries:
        yield Finding(
            "error",
            f"{LIBRARIES} has no libcuda.so.1: Windows passes no NVIDIA GPU on to WSL2",
            "install NVIDIA's driver in Windows, update WSL, and start it again, from PowerShell",
            ("wsl.exe --update", "wsl.exe --shutdown"),
        )
    elif tool is not None and not tool.startswith(LIBRARIES):
        yield Finding(
            "error",
            f"nvidia-smi is {tool}: a Linux driver is installed inside WSL2 and hides Windows' own",
            "remove it; the driver belongs into Windows alone",
            ("sudo apt purge 'nvidia-driver-*' 'libnvidia-*' && sudo apt autoremove",),
        )


@check("wsl.memory", "warning", "the memory of WSL2's virtual machine, half of Windows' by default")
def memory(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    total = meminfo(machine).get("MemTotal")
    if wsl(machine) and total is not None and total < LEAST_MEMORY:
        yield Finding(
            "warning",
            f"WSL2's virtual machine has {gib(total)} of memory; loading, and experts in host memory, need more",
            "give it more in .wslconfig of your Windows user, then run `wsl.exe --shutdown`",
            ("printf '[wsl2]\\nmemory=24GB\\n' >> /mnt/c/Users/YOU/.wslconfig",),
        )


@check("wsl.disk", "warning", "models and caches on a drive of Windows, which WSL2 reads slowly")
def disk(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not wsl(machine):
        return
    for folder in dict.fromkeys((models_root(machine), cache_root(machine))):
        kind = (machine.ask("disk", folder) or {}).get("kind")
        if kind in WINDOWS_FILES:
            yield Finding(
                "warning",
                f"{folder} is on a drive of Windows ({kind}), which WSL2 reads several times slower than its own files",
                "keep models and caches in WSL's own file system, under your home folder",
                ("unset HALFBYTE_MODELS_DIR HALFBYTE_CACHE_DIR", f"mv {folder} ~/"),
            )
