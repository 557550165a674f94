"""Memory: whether the model fits, and what freezes a host that shares its memory with the GPU (GB10).

On unified memory the weights, the KV cache and the page cache share one pool. Swap makes every step wait for the disk,
and the kernel's OOM killer acts too late: the host stops responding first. `halfbyte serve` makes the exact account
before it loads anything (`memory.py`); these checks report beforehand what would stop it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfbyte.caches import max_jobs
from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import GIB, available, gib, gpus, meminfo, unified, weights

ROOM = 4 * GIB  # for the KV cache, workspace and the rest of a start
DROP_CACHES = "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches"


@check("memory.fits", "error", "whether the weights and 4 GiB more fit into the available memory of the device")
def fits(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    size = weights(machine, purpose.model)
    if size is None:
        return
    cards = [gpu for gpu in gpus(machine) if not gpu.unified]
    if cards:
        best = max(cards, key=lambda gpu: gpu.free or 0)
        if best.free is not None and best.free < size + ROOM:
            yield Finding(
                "error",
                f"{purpose.model} needs {gib(size)} and {gib(ROOM)} of room; {best.name} has {gib(best.free)} free of "
                f"{gib(best.total or 0)}",
                "stop what else runs on the GPU, choose a smaller model, or serve from the CPU with --device cpu",
                ("nvidia-smi",),
            )
        return
    left, total = available(machine), meminfo(machine).get("MemTotal")
    limits = [int(group["limit"]) for group in machine.ask("cgroup_memory") or ()]
    if left is not None and left < size + ROOM and not any(limit < size + ROOM for limit in limits):
        yield Finding(
            "error",
            f"{purpose.model} needs {gib(size)} and {gib(ROOM)} of room; {gib(left)} are available of "
            f"{gib(total or 0)}",
            "stop what else takes memory, or choose a smaller model",
            ("ps -eo pid,rss,comm --sort=-rss | head",),
        )


@check("memory.cgroup", "error", "whether the model fits the memory limit of this container or service")
def cgroup(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    limits = [int(group["limit"]) for group in machine.ask("cgroup_memory") or ()]
    total = meminfo(machine).get("MemTotal", 0)
    lowest = min((limit for limit in limits if limit < total), default=None)
    size = weights(machine, purpose.model)
    if lowest is None:
        return
    if size is not None and lowest < size + ROOM and (unified(machine) or not gpus(machine)):
        yield Finding(
            "error",
            f"the cgroup's limit is {gib(lowest)}, and {purpose.model} needs {gib(size)} and {gib(ROOM)} of room; the "
            f"machine has {gib(total)}",
            "raise the limit (Docker: --memory, compose: mem_limit, systemd: MemoryMax=)",
            (f"docker update --memory {-(-(size + 2 * ROOM) // GIB)}g CONTAINER",),
        )
    elif lowest < ROOM:
        yield Finding(
            "warning",
            f"the cgroup's limit is {gib(lowest)}: enough for the embedded model and little else",
            "raise the limit (Docker: --memory, compose: mem_limit, systemd: MemoryMax=)",
        )


@check("memory.swap", "error", "swap that is enabled on unified memory, or in use")
def swap(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    counters = meminfo(machine)
    total, used = counters.get("SwapTotal", 0), counters.get("SwapTotal", 0) - counters.get("SwapFree", 0)
    if total == 0:
        return
    if unified(machine):
        severity = "error" if used > GIB else "warning"
        yield Finding(
            severity,
            f"{gib(total)} of swap are enabled and {gib(used)} in use; on unified memory the GPU's pages push the rest "
            "of the host into swap, and the machine stops responding before any process is killed",
            "disable swap, now and at the next boot",
            ("sudo swapoff -a", r"sudo sed -i.bak '/\sswap\s/s/^/#/' /etc/fstab"),
        )
    elif used > GIB and used > total // 4:
        yield Finding(
            "warning",
            f"{gib(used)} of {gib(total)} swap are in use: the server may have to wait for the disk",
            "stop the processes that use the memory, then empty the swap",
            ("sudo swapoff -a && sudo swapon -a",),
        )


@check("memory.page-cache", "warning", "page cache that a CUDA allocation on unified memory would have to evict")
def page_cache(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    counters, size = meminfo(machine), weights(machine, purpose.model)
    free, cached = counters.get("MemFree"), counters.get("Cached", 0) + counters.get("Buffers", 0)
    if not unified(machine) or free is None:
        return
    if free < (size or 8 * GIB) + ROOM and cached > 8 * GIB:
        yield Finding(
            "warning",
            f"{gib(cached)} are page cache and {gib(free)} are free: CUDA counts the cache as used, so engines that "
            "rely on CUDA refuse to start or take too little (halfbyte uses MemAvailable)",
            "drop the page cache before the model is loaded",
            (DROP_CACHES,),
        )


@check("memory.pressure", "error", "how long tasks wait for memory (PSI)")
def pressure(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    text = machine.file("/proc/pressure/memory") or ""
    shares = {m[1]: float(m[2]) for m in re.finditer(r"^(some|full) avg10=([\d.]+)", text, re.MULTILINE)}
    some, full = shares.get("some", 0.0), shares.get("full", 0.0)
    if some >= 10 or full >= 5:
        yield Finding(
            "error" if full >= 10 else "warning",
            f"in the last ten seconds some task waited for memory {some:.0f} % of the time, all of them {full:.0f} %",
            "stop the processes that use the memory before loading a model",
            ("ps -eo pid,rss,comm --sort=-rss | head",),
        )


@check("memory.guard", "warning", "an out-of-memory guard (earlyoom, systemd-oomd, nohang) on unified memory")
def guard(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not unified(machine) or machine.ask("container") is not None:  # a container does not see its host's services
        return
    running = {p["name"] for p in machine.ask("processes") or ()}
    if not running & {"earlyoom", "systemd-oomd", "nohang"}:
        yield Finding(
            "warning",
            "no earlyoom, systemd-oomd or nohang is running; the kernel's own OOM killer acts only after a host with "
            "unified memory has stopped responding",
            "install a guard that acts while there is memory left (halfbyte's server has a watchdog of its own)",
            ("sudo apt install earlyoom", "sudo systemctl enable --now earlyoom"),
        )


@check(
    "memory.cma", "warning", "pages that the kernel reserves for contiguous allocations (KHO) and the GPU cannot pin"
)
def cma(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    counters = meminfo(machine)
    extra = counters.get("CmaFree", 0) - counters.get("CmaTotal", 0)
    if unified(machine) and extra > GIB:
        kernel = (machine.ask("system") or {}).get("kernel", "this kernel")
        yield Finding(
            "warning",
            f"CmaFree is {gib(extra)} above CmaTotal on {kernel}: kexec handover set that memory aside, and pinning "
            "pages for RDMA or the GPU fails with ENOMEM near full memory (NVIDIA/NV-Kernels#591)",
            "start the kernel with kho=off",
            (
                r"sudo sed -i.bak 's/^GRUB_CMDLINE_LINUX=\"/&kho=off /' /etc/default/grub",
                "sudo update-grub && sudo reboot",
            ),
        )


@check("memory.killed", "warning", "processes killed for memory and failed driver allocations in the kernel's log")
def killed(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    lines = machine.ask("kernel_log") or ()
    failures = [line for line in lines if "Xid" not in line]
    if failures:
        yield Finding(
            "warning",
            f"the kernel's log has {len(failures)} out-of-memory lines, the last: {failures[-1].strip()}",
            "find out what used the memory; start the server with a smaller --kv-memory or a larger --reserve",
            ("dmesg -T | grep -E 'Out of memory|oom-kill|NV_ERR_NO_MEMORY'",),
        )


@check("memory.jobs", "warning", "whether MAX_JOBS compilers of FlashInfer and vLLM fit into the available memory")
def jobs(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    installed, left = machine.packages(), available(machine)
    if left is None or not {"vllm", "flashinfer-python"} & set(installed):
        return
    cores = int((machine.ask("cores") or {}).get("usable", 1))
    best, setting = max_jobs(left, cores), machine.variables().get("MAX_JOBS")
    jobs_now = int(setting) if setting and setting.isdigit() else cores
    if jobs_now > best:
        yield Finding(
            "warning",
            f"MAX_JOBS is {setting or f'not set, so {cores} compilers run at once'}, each of which may take 8 GiB; "
            f"{gib(left)} are available",
            "limit the number of compilers before anything is compiled",
            (f"export MAX_JOBS={best}",),
        )
