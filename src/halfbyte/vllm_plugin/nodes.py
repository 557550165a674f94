"""vLLM on several machines: its multi-node launch, one command per machine, and the network's variables.

vLLM schedules across machines, with `--nnodes --node-rank --headless` or with Ray. The default variables are those of
two DGX Sparks on their direct link; for another network, set its interface. This module does not import vLLM and starts
no process.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfbyte.errors import UsageError
from halfbyte.vllm_plugin.launch import VllmLaunch

SPARK_INTERFACE = "enp1s0f1np1"  # the cabled port of the ConnectX-7, as DGX OS names it
SPARK_HCA = "rocep1s0f1,roceP2p1s0f1"  # its two halves as RDMA devices: each carries half of the link
PORT = 29501
LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Network:
    interface: str | None = SPARK_INTERFACE  # None: left to NCCL
    hca: str | None = SPARK_HCA
    port: int = PORT

    def variables(self) -> dict[str, str]:
        """NCCL and Gloo on one interface, RDMA on its devices."""
        variables: dict[str, str] = {}
        if self.interface is not None:
            variables |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), self.interface)
        if self.hca is not None:
            variables |= {"NCCL_IB_HCA": self.hca, "NCCL_IB_DISABLE": "0"}
        return variables


@dataclass(frozen=True)
class Node:
    host: str
    rank: int
    launch: VllmLaunch

    @property
    def is_local(self) -> bool:
        """Whether the node runs on this machine. The first node does: it serves."""
        return self.rank == 0 or self.host in LOCAL

    def command(self) -> list[str]:
        """The command that starts the node from here, through ssh for a remote one."""
        if self.is_local:
            return list(self.launch.command)
        return ["ssh", "-o", "BatchMode=yes", self.host, "exec env " + self.launch.shell()]


def parse_nodes(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    if len(hosts) < 2 or not all(hosts):
        raise UsageError(f"--nodes is {text!r}; list two or more machines as host1,host2; the first one serves.")
    return hosts


def node_arguments(hosts: Sequence[str], rank: int, network: Network) -> list[str]:
    """vLLM's flags for one machine of several."""
    return [
        "--nnodes",
        str(len(hosts)),
        "--node-rank",
        str(rank),
        "--master-addr",
        hosts[0],
        "--master-port",
        str(network.port),
        *(["--headless"] if rank else []),
    ]


def node_launches(launch: VllmLaunch, hosts: Sequence[str], ranks: int, network: Network | None = None) -> list[Node]:
    """One command per machine; the first machine serves. `ranks`: tensor parallelism over all machines."""
    if ranks % len(hosts):
        raise UsageError(f"--tp is {ranks}, which does not divide among {len(hosts)} machines; use a multiple of them.")
    network = network or Network(None, None) if all(h in LOCAL for h in hosts) else network or Network()
    nodes = []
    for rank, host in enumerate(hosts):
        variables = {**launch.environment, **network.variables()}
        if host not in LOCAL and _is_address(host):
            variables["VLLM_HOST_IP"] = host  # the address that vLLM listens on; otherwise it chooses one
        own = replace(launch, command=(*launch.command, *node_arguments(hosts, rank, network)), environment=variables)
        nodes.append(Node(host, rank, own))
    return nodes


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def ray_lines(launch: VllmLaunch, hosts: Sequence[str], ranks: int) -> list[str]:
    """The launch with Ray as shell lines: start the cluster, then run one command on its head."""
    head = f"ray start --head --node-ip-address {hosts[0]} --port 6379"
    others = [f"ssh {host} ray start --address {hosts[0]}:6379" for host in hosts[1:]]
    command = replace(launch, command=(*launch.command, "--distributed-executor-backend", "ray"))
    return [head, *others, command.shell()]


def lines(nodes: Sequence[Node]) -> list[str]:
    """A line for each machine, for --dry-run."""
    return [
        f"# {node.host}\n{shlex.join(node.command()) if not node.is_local else node.launch.shell()}" for node in nodes
    ]
