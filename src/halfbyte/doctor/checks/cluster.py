"""What two machines need to be one: the interface, its MTU, RDMA devices that are up, equal versions.

With `--cluster` this machine's network is looked at, as docs/vllm.md sets it up for two DGX Sparks; with `--peer` every
other machine's record is compared with it. Bandwidth over the cable is not measured here: that takes both ends, and the
note of `cluster.rdma` has the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import gpus
from halfbyte.vllm_plugin.nodes import SPARK_INTERFACE

NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
MTU = 9000
RAIL_GBIT = 100  # each half of a Spark's port
COMPARED = ("halfbyte", "torch", "vllm", "triton", "flashinfer-python", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def interface(machine: Machine) -> str:
    return next((machine.variables()[n] for n in NAMES if n in machine.variables()), SPARK_INTERFACE)


def read(machine: Machine, name: str, what: str) -> str:
    return (machine.file(f"/sys/class/net/{name}/{what}") or "").strip()


@check("cluster.interface", "error", "the interface that NCCL and Gloo are told: named, there, up", cluster=True)
def interfaces(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    told = {name: machine.variables()[name] for name in NAMES if name in machine.variables()}
    there = [name for name in machine.folder("/sys/class/net") if name != "lo"]
    if len(set(told.values())) > 1:
        yield Finding(
            "error",
            "NCCL and Gloo are told different interfaces: " + ", ".join(f"{n}={v}" for n, v in told.items()),
            "name one interface for all",
            tuple(f"export {name}={interface(machine)}" for name in NAMES),
        )
    name = interface(machine)
    if name not in there:
        unsaid = "" if told else ", as on a DGX Spark, and NCCL_SOCKET_IFNAME names no other"
        yield Finding(
            "error" if told else "warning",
            f"there is no interface {name}{unsaid}; there are {', '.join(there) or 'none'}",
            "name the one that the cable is in",
            tuple(f"export {n}={there[0] if there else 'INTERFACE'}" for n in NAMES),
        )
    elif read(machine, name, "operstate") != "up":
        yield Finding(
            "error",
            f"{name} is {read(machine, name, 'operstate') or 'not up'}",
            "look at the cable, then bring it up",
            (f"sudo ip link set {name} up",),
        )
    elif not told:
        yield Finding(
            "note",
            f"NCCL_SOCKET_IFNAME is not set: NCCL may take another interface than {name}",
            "name it (halfbyte serve --nodes does)",
            tuple(f"export {n}={name}" for n in NAMES),
        )


@check("cluster.mtu", "error", "jumbo frames on that interface, the same on every machine", cluster=True)
def mtu(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    name = interface(machine)
    own = read(machine, name, "mtu")
    raise_it = (f"sudo ip link set {name} mtu {MTU}",)
    if own.isdigit() and int(own) < MTU:
        yield Finding("warning", f"{name} has an MTU of {own}", f"use {MTU} on every machine", raise_it)
    for i, peer in enumerate(purpose.peers, start=2):
        other = read(peer, interface(peer), "mtu")
        if own.isdigit() and other.isdigit() and own != other:
            yield Finding(
                "error",
                f"the MTU is {own} here and {other} on machine {i}: large messages are lost between them",
                f"use {MTU} on every machine",
                raise_it,
            )


@check("cluster.rdma", "error", "RDMA devices: pinned by NCCL_IB_HCA, there, active, and their rate", cluster=True)
def rdma(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    there = machine.folder("/sys/class/infiniband")
    if not there:
        yield Finding(
            "warning",
            "there are no RDMA devices: NCCL goes over TCP, which is several times slower",
            "install rdma-core, and give a container the devices",
            ("sudo apt install rdma-core", "docker run --device /dev/infiniband --cap-add IPC_LOCK …"),
        )
        return
    named = [n.split(":")[0].lstrip("=^") for n in machine.variables().get("NCCL_IB_HCA", "").split(",") if n]
    missing = [name for name in named if name not in there]
    if missing:
        yield Finding(
            "error",
            f"NCCL_IB_HCA names {', '.join(missing)}; there are {', '.join(there)}",
            "name devices that are there",
            (f"export NCCL_IB_HCA={','.join(there)}",),
        )
    elif not named and len(there) > 1:
        yield Finding(
            "warning",
            f"NCCL_IB_HCA is not set, and there are {len(there)} RDMA devices: NCCL may take one without a cable",
            "pin those of the cabled port",
            (f"export NCCL_IB_HCA={','.join(there)}",),
        )
    for name in [n for n in named if n in there] or there:
        state = (machine.file(f"/sys/class/infiniband/{name}/ports/1/state") or "").strip()
        rate = re.match(r"\d+", (machine.file(f"/sys/class/infiniband/{name}/ports/1/rate") or "").strip())
        if named and state and "ACTIVE" not in state:
            yield Finding("error", f"{name} is {state}", "look at the cable and the link", (f"ibstat {name}",))
        elif "ACTIVE" in state and rate and int(rate[0]) < RAIL_GBIT:
            yield Finding(
                "warning",
                f"{name} runs at {rate[0]} Gb/s; each half of a Spark's port has {RAIL_GBIT}",
                "look at the cable, then measure each rail from the other machine",
                (f"ib_write_bw -d {name} --report_gbits", f"ib_write_bw -d {name} --report_gbits OTHER_HOST"),
            )


@check("cluster.locked", "warning", "how much memory a process may pin for RDMA", cluster=True)
def locked(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    limit = (machine.ask("limits") or {}).get("locked")
    if limit is not None and 0 <= limit < 1 << 30:
        yield Finding(
            "warning",
            f"a process may lock {limit / 2**20:.0f} MiB; registering buffers for RDMA fails above it",
            "raise the limit (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1)",
            ("ulimit -l unlimited",),
        )


@check("cluster.equal", "error", "GPU, driver and package versions of the other machines", cluster=True)
def equal(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    own, mine = gpus(machine), machine.packages()
    for i, peer in enumerate(purpose.peers, start=2):
        other, theirs = gpus(peer), peer.packages()
        if own and other and own[0].name != other[0].name:
            yield Finding("error", f"{own[0].name} here, {other[0].name} on machine {i}", "use equal machines")
        if own and other and own[0].driver != other[0].driver:
            yield Finding(
                "error",
                f"driver {own[0].driver} here, {other[0].driver} on machine {i}",
                "install the same driver on both",
                (f"sudo apt install nvidia-driver-{max(own[0].driver, other[0].driver).split('.')[0]}-open",),
            )
        differ = [n for n in COMPARED if mine.get(n) != theirs.get(n)]
        if differ:
            listed = ", ".join(f"{n} {mine.get(n, 'none')} and {theirs.get(n, 'none')}" for n in differ)
            severity = "error" if {"vllm", "torch", "halfbyte"} & set(differ) or "nccl" in listed else "warning"
            yield Finding(
                severity,
                f"packages differ from machine {i}: {listed}",
                "install the same ones on both, or use one image",
            )


@check("cluster.names", "error", "the interface and RDMA devices that the other machines were told", cluster=True)
def names(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for i, peer in enumerate(purpose.peers, start=2):
        there = peer.folder("/sys/class/net")
        if there and interface(peer) not in there:
            yield Finding(
                "error",
                f"machine {i} is told to use {interface(peer)}, which it does not have ({', '.join(there)})",
                "name its own interface there",
                tuple(f"export {n}=INTERFACE" for n in NAMES),
            )
