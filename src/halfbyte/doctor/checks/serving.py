"""What a server needs of its host: its port, file descriptors, shared memory, somebody who reaps its children."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import GIB, gib

FILES = 1024  # two for each of the most connections, and then some
SHARED = GIB  # NCCL and vLLM's processes hand tensors over in /dev/shm
MANY_ZOMBIES = 3


@check("port.free", "error", "the port that the server would listen on")
def port(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    taken = machine.ask("port", str(purpose.port))
    if taken is None:
        return
    if taken["program"] == "halfbyte":
        yield Finding(
            "note",
            f"a halfbyte server (pid {taken['pid']}) listens on port {purpose.port} already",
            "start another one on another port",
            (f"halfbyte serve --port {purpose.port + 1}",),
        )
        return
    who = f"{taken['program']} (pid {taken['pid']})" if taken["pid"] else "another process"
    yield Finding(
        "error",
        f"port {purpose.port} is taken by {who}",
        "serve on another port, or end what has it",
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
    wanted = purpose.cluster or "vllm" in machine.packages()
    if wanted and disk and disk["total"] < SHARED:
        yield Finding(
            "warning",
            f"/dev/shm has {disk['total'] / 2**20:.0f} MiB; NCCL and vLLM's processes hand tensors over there",
            "start the container with more",
            ("docker run --shm-size 1g …",),
        )


@check("container.init", "note", "a first process that reaps the others")
def init(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    first = machine.ask("first_process")
    if machine.ask("container") is not None and first in ("bash", "sh", "python", "python3", "halfbyte", "vllm"):
        yield Finding(
            "note",
            f"the container's first process is {first}, which leaves processes that ended behind as zombies",
            "start the container with an init",
            ("docker run --init …",),
        )


@check("processes.zombies", "warning", "processes that ended and that nobody reaped")
def zombies(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found = [p for p in machine.ask("processes") or () if p["zombie"]]
    if len(found) >= MANY_ZOMBIES:
        parents = sorted({p["parent"] for p in found})
        yield Finding(
            "warning",
            f"{len(found)} zombies, such as {found[0]['name']} (pid {found[0]['pid']}), of {parents[0]}",
            "restart their parent, or the container with --init",
            (f"ps -o pid,comm -p {parents[0]}",),
        )


@check("processes.orphans", "warning", "engines whose starter is gone and that still hold memory")
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


@check("processes.compilers", "note", "compilers at work, whose memory a start would have to share")
def compilers(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found = [p for p in machine.ask("processes") or () if p["name"] in ("cicc", "nvcc", "ptxas", "cc1plus")]
    size = sum(p["bytes"] for p in found)
    if size > 4 * GIB:
        yield Finding(
            "note", f"{len(found)} compilers hold {gib(size)}", "wait for them, or lower MAX_JOBS", ("top -o %MEM",)
        )
