"""What several machines need to form a cluster: one interface, its MTU, active RDMA devices, equal versions.

`--cluster` examines this machine's network, as docs/vllm.md sets it up for two DGX Sparks; `--peer` also compares the
records of the other machines with it. Bandwidth is not measured, because that needs both ends; the finding of
`cluster.rdma` has the command.
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


def read(machine: Machine, name: str, file: str) -> str:
    return (machine.file(f"/sys/class/net/{name}/{file}") or "").strip()


@check("cluster.interface", "error", "the interface set for NCCL and Gloo: consistent, present, up", cluster=True)
def interfaces(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    interfaces_set = {name: machine.variables()[name] for name in NAMES if name in machine.variables()}
    there = [name for name in machine.folder("/sys/class/net") if name != "lo"]
    if len(set(interfaces_set.values())) > 1:
        yield Finding(
            "error",
            "NCCL and Gloo have different interfaces: " + ", ".join(f"{n}={v}" for n, v in interfaces_set.items()),
            "set one interface for all of them",
            tuple(f"export {name}={interface(machine)}" for name in NAMES),
        )
    name = interface(machine)
    if name not in there:
        default = "" if interfaces_set else " (the default, a DGX Spark's; NCCL_SOCKET_IFNAME is not set)"
        yield Finding(
            "error" if interfaces_set else "warning",
            f"there is no interface {name}{default}; the interfaces are {', '.join(there) or 'none'}",
            "set the interface that the cable is plugged into",
            tuple(f"export {n}={there[0] if there else 'INTERFACE'}" for n in NAMES),
        )
    elif read(machine, name, "operstate") != "up":
        yield Finding(
            "error",
            f"{name} is {read(machine, name, 'operstate') or 'not up'}",
            "check the cable, then bring the interface up",
            (f"sudo ip link set {name} up",),
        )
    elif not interfaces_set:
        yield Finding(
            "note",
            f"NCCL_SOCKET_IFNAME is not set: NCCL may choose an interface other than {name}",
            "set it (halfbyte serve --nodes does)",
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


@check("cluster.rdma", "error", "RDMA devices: set in NCCL_IB_HCA, present, active, and their rate", cluster=True)
def rdma(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    there = machine.folder("/sys/class/infiniband")
    if not there:
        yield Finding(
            "warning",
            "there are no RDMA devices: NCCL uses TCP, which is several times slower",
            "install rdma-core, and pass the devices to the container",
            ("sudo apt install rdma-core", "docker run --device /dev/infiniband --cap-add IPC_LOCK …"),
        )
        return
    devices_set = [n.split(":")[0].lstrip("=^") for n in machine.variables().get("NCCL_IB_HCA", "").split(",") if n]
    missing = [name for name in devices_set if name not in there]
    if missing:
        yield Finding(
            "error",
            f"NCCL_IB_HCA names {', '.join(missing)}; the devices are {', '.join(there)}",
            "set it to devices that exist",
            (f"export NCCL_IB_HCA={','.join(there)}",),
        )
    elif not devices_set and len(there) > 1:
        yield Finding(
            "warning",
            f"NCCL_IB_HCA is not set and there are {len(there)} RDMA devices: NCCL may choose one without a cable",
            "set it to the devices of the cabled port",
            (f"export NCCL_IB_HCA={','.join(there)}",),
        )
    for name in [n for n in devices_set if n in there] or there:
        state = (machine.file(f"/sys/class/infiniband/{name}/ports/1/state") or "").strip()
        rate = re.match(r"\d+", (machine.file(f"/sys/class/infiniband/{name}/ports/1/rate") or "").strip())
        if devices_set and state and "ACTIVE" not in state:
            yield Finding("error", f"{name} is {state}", "check the cable and the link", (f"ibstat {name}",))
        elif "ACTIVE" in state and rate and int(rate[0]) < RAIL_GBIT:
            yield Finding(
                "warning",
                f"{name} runs at {rate[0]} Gb/s; each half of a Spark's port has {RAIL_GBIT}",
                "check the cable, then measure each rail from the other machine",
                (f"ib_write_bw -d {name} --report_gbits", f"ib_write_bw -d {name} --report_gbits OTHER_HOST"),
            )


@check("cluster.locked", "warning", "how much memory a process may lock for RDMA", cluster=True)
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
    own, own_packages = gpus(machine), machine.packages()
    for i, peer in enumerate(purpose.peers, start=2):
        other, other_packages = gpus(peer), peer.packages()
        if own and other and own[0].name != other[0].name:
            yield Finding("error", f"{own[0].name} here, {other[0].name} on machine {i}", "use equal machines")
        if own and other and own[0].driver != other[0].driver:
            yield Finding(
                "error",
                f"driver {own[0].driver} here, {other[0].driver} on machine {i}",
                "install the same driver on both",
                (f"sudo apt install nvidia-driver-{max(own[0].driver, other[0].driver).split('.')[0]}-open",),
            )
        differ = [n for n in COMPARED if own_packages.get(n) != other_packages.get(n)]
        if differ:
            listed = ", ".join(f"{n} {own_packages.get(n, 'none')} and {other_packages.get(n, 'none')}" for n in differ)
            severity = "error" if {"vllm", "torch", "halfbyte"} & set(differ) or "nccl" in listed else "warning"
            yield Finding(
                severity,
                f"packages differ from machine {i}: {listed}",
                "install the same ones on both, or use one image",
            )


@check("cluster.names", "error", "the interface set on each of the other machines", cluster=True)
def names(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    for i, peer in enumerate(purpose.peers, start=2):
        there = peer.folder("/sys/class/net")
        if there and interface(peer) not in there:
            yield Finding(
                "error",
                f"machine {i} is set to use {interface(peer)}, which it does not have ({', '.join(there)})",
                "set an interface of that machine there",
                tuple(f"export {n}=INTERFACE" for n in NAMES),
            )
