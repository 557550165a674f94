"""What a server needs from its host: a port, file descriptors, shared memory, an init that reaps its children."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import GIB, gib

FILES = 1024  # two for each connection at the maximum, and a margin
SHARED = GIB  # NCCL and vLLM's processes exchange tensors in /dev/shm
MANY_ZOMBIES = 3


@check("port.free", "error", "the port that the server would listen on")
def port(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    listener = machine.ask("port", str(purpose.port))
    if listener is None:
        return
    if listener["program"] == "halfbyte":
        yield Finding(
            "note",
            f"a halfbyte server (pid {listener['pid']}) already listens on port {purpose.port}",
            "start another one on another port",
            (f"halfbyte serve --port {purpose.port + 1}",),
        )
        return
    who = f"{listener['program']} (pid {listener['pid']})" if listener["pid"] else "another process"
    yield Finding(
        "error",
        f"port {purpose.port} is in use by {who}",
        "serve on another port, or stop that process",
        (f"ss -ltnp 'sport = :{purpose.port}'", f"halfbyte serve --port {purpose.port + 1}"),
    )


@check("limits.files", "warning", "how many files and connections a process may have open")
def files(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    count = (machine.ask("limits") or {}).get("files")
    if count is not None and 0 <= count < FILES:
        yield Finding(
            "warning",
            f"a process may have {count} files open; a busy server needs {FILES}",
            "raise the limit (systemd: LimitNOFILE=, Docker: --ulimit nofile=)",
            ("ulimit -n 65536",),
        )


@check("container.shm", "warning", "the size of /dev/shm where vLLM or a cluster needs it")
def shared_memory(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    disk = machine.ask("disk", "/dev/shm") or {}
    needed = purpose.cluster or "vllm" in machine.packages()
    if needed and disk and disk["total"] < SHARED:
        yield Finding(
            "warning",
            f"/dev/shm has {disk['total'] / 2**20:.0f} MiB; NCCL and vLLM's processes exchange tensors there",
            "start the container with a larger one",
            ("docker run --shm-size 1g …",),
        )


@check("container.init", "note", "an init process that reaps zombies in the container")
def init(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    first = machine.ask("first_process")
    if machine.ask("container") is not None and first in ("bash", "sh", "python", "python3", "halfbyte", "vllm"):
        yield Finding(
            "note",
            f"the container's first process is {first}, which does not reap ended processes: they remain as zombies",
            "start the container with an init",
            ("docker run --init …",),
        )


@check("processes.zombies", "warning", "ended processes that were never reaped")
def zombies(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    unreaped = [p for p in machine.ask("processes") or () if p["zombie"]]
    if len(unreaped) >= MANY_ZOMBIES:
        parents = sorted({p["parent"] for p in unreaped})
        yield Finding(
            "warning",
            f"{len(unreaped)} zombies, such as {unreaped[0]['name']} (pid {unreaped[0]['pid']}), children of "
            f"{parents[0]}",
            "restart their parent, or restart the container with --init",
            (f"ps -o pid,comm -p {parents[0]}",),
        )


@check("processes.orphans", "warning", "engines without a parent process that still hold memory")
def orphans(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for p in machine.ask("processes") or ():
        holds = not p["zombie"] and p["parent"] == 1 and p["bytes"] > GIB
        if holds and p["name"] in ("vllm", "sglang", "ray", "llama-server", "trtllm-serve"):
            yield Finding(
                "warning",
                f"{p['name']} (pid {p['pid']}) has no parent and holds {gib(p['bytes'])}",
                "end it if no service started it",
                (f"kill {p['pid']}",),
            )


@check("processes.compilers", "note", "running compilers, which share the memory with a starting server")
def compilers(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    running = [p for p in machine.ask("processes") or () if p["name"] in ("cicc", "nvcc", "ptxas", "cc1plus")]
    size = sum(p["bytes"] for p in running)
    if size > 4 * GIB:
        yield Finding(
            "note", f"{len(running)} compilers hold {gib(size)}", "wait for them, or lower MAX_JOBS", ("top -o %MEM",)
        )
