"""Memory: whether the model fits, and what freezes a host whose GPU lives in its memory (GB10).

On unified memory weights, KV cache and page cache share one pool, swap makes every step wait for the disk, and the
kernel's OOM killer comes too late: the host stops answering first. `halfbyte serve` does the exact account before it
loads anything (`memory.py`); these checks say beforehand what stands in its way.
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


@check("memory.fits", "error", "whether the weights and 4 GiB more fit what is available, on the device that will run")
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


@check("memory.cgroup", "error", "memory limits of the container or service that this runs in, against the model")
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


@check("memory.swap", "error", "swap: switched on where memory is unified, or in use")
def swap(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found = meminfo(machine)
    total, used = found.get("SwapTotal", 0), found.get("SwapTotal", 0) - found.get("SwapFree", 0)
    if total == 0:
        return
    if unified(machine):
        severity = "error" if used > GIB else "warning"
        yield Finding(
            severity,
            f"{gib(total)} of swap are on and {gib(used)} in use; on unified memory the GPU's pages push the rest of "
            "the host into it, and the machine stops answering before anything is killed",
            "switch swap off, now and at the next boot",
            ("sudo swapoff -a", r"sudo sed -i.bak '/\sswap\s/s/^/#/' /etc/fstab"),
        )
    elif used > GIB and used > total // 4:
        yield Finding(
            "warning",
            f"{gib(used)} of {gib(total)} swap are in use: what serves may have to wait for the disk",
            "stop what takes the memory, then empty the swap",
            ("sudo swapoff -a && sudo swapon -a",),
        )


@check("memory.page-cache", "warning", "page cache that a CUDA allocation on unified memory would have to push out")
def page_cache(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found, size = meminfo(machine), weights(machine, purpose.model)
    free, cached = found.get("MemFree"), found.get("Cached", 0) + found.get("Buffers", 0)
    if not unified(machine) or free is None:
        return
    if free < (size or 8 * GIB) + ROOM and cached > 8 * GIB:
        yield Finding(
            "warning",
            f"{gib(cached)} are page cache and {gib(free)} are free: CUDA counts the cache as used, and engines that "
            "ask it refuse to start or take too little (halfbyte counts MemAvailable)",
            "drop the page cache before the model is loaded",
            (DROP_CACHES,),
        )


@check("memory.pressure", "error", "PSI: how long tasks wait for memory")
def pressure(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    text = machine.file("/proc/pressure/memory") or ""
    shares = {m[1]: float(m[2]) for m in re.finditer(r"^(some|full) avg10=([\d.]+)", text, re.MULTILINE)}
    some, full = shares.get("some", 0.0), shares.get("full", 0.0)
    if some >= 10 or full >= 5:
        yield Finding(
            "error" if full >= 10 else "warning",
            f"in the last ten seconds some task waited for memory {some:.0f} % of the time, all of them {full:.0f} %",
            "stop what takes the memory before anything is loaded",
            ("ps -eo pid,rss,comm --sort=-rss | head",),
        )


@check("memory.guard", "warning", "a guard (earlyoom, systemd-oomd, nohang) where memory is unified")
def guard(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not unified(machine) or machine.ask("container") is not None:  # a container does not see its host's services
        return
    running = {p["name"] for p in machine.ask("processes") or ()}
    if not running & {"earlyoom", "systemd-oomd", "nohang"}:
        yield Finding(
            "warning",
            "no earlyoom, systemd-oomd or nohang is running; the kernel's own OOM killer comes after a host with "
            "unified memory has stopped answering",
            "install a guard that acts while there is memory left (halfbyte's server has a watchdog of its own)",
            ("sudo apt install earlyoom", "sudo systemctl enable --now earlyoom"),
        )


@check("memory.cma", "warning", "pages that the kernel keeps for contiguous allocations and the GPU cannot pin (KHO)")
def cma(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found = meminfo(machine)
    extra = found.get("CmaFree", 0) - found.get("CmaTotal", 0)
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


@check("memory.killed", "warning", "the kernel's log: processes killed for memory, allocations that the driver lost")
def killed(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    lines = machine.ask("kernel_log") or ()
    told = [line for line in lines if "Xid" not in line]
    if told:
        yield Finding(
            "warning",
            f"the kernel's log has {len(told)} such lines, the last: {told[-1].strip()}",
            "find out what took the memory; give the server a smaller --kv-memory or a larger --reserve",
            ("dmesg -T | grep -E 'Out of memory|oom-kill|NV_ERR_NO_MEMORY'",),
        )


@check("memory.jobs", "warning", "MAX_JOBS of kernels that FlashInfer and vLLM compile, against available memory")
def jobs(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    installed, left = machine.packages(), available(machine)
    if left is None or not {"vllm", "flashinfer-python"} & set(installed):
        return
    cores = int((machine.ask("cores") or {}).get("usable", 1))
    best, asked = max_jobs(left, cores), machine.variables().get("MAX_JOBS")
    jobs_now = int(asked) if asked and asked.isdigit() else cores
    if jobs_now > best:
        yield Finding(
            "warning",
            f"MAX_JOBS is {asked or f'not set, so {cores} compilers run at once'}, each of which may take 8 GiB; "
            f"{gib(left)} are available",
            "limit the compilers before anything is compiled",
            (f"export MAX_JOBS={best}",),
        )
