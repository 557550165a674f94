"""vLLM's own multi-node launch: one command a machine, with the network's variables, shown and not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.cli.serve_vllm import Others
from halfbyte.engine.request import SourceHealth
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.vllm_plugin.launch import Serving, VllmLaunch, vllm_command
from halfbyte.vllm_plugin.nodes import Network, Node, node_launches, parse_nodes, ray_lines

LAUNCH = vllm_command("m", Gates(), serving=Serving(tensor_parallel=2), python="python")


def test_two_sparks() -> None:
    first, second = node_launches(LAUNCH, ("10.0.0.1", "10.0.0.2"), 2)
    assert " ".join(first.launch.command).endswith(
        "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29501"
    )
    assert second.launch.command[-1] == "--headless"
    assert "--node-rank 1" in " ".join(second.launch.command)
    for node, address in ((first, "10.0.0.1"), (second, "10.0.0.2")):
        env = node.launch.environment
        assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "enp1s0f1np1"
        assert env["NCCL_IB_HCA"] == "rocep1s0f1,roceP2p1s0f1"
        assert env["VLLM_HOST_IP"] == address
    assert first.command()[0] == "python"  # the first one is this machine
    assert second.command()[:4] == ["ssh", "-o", "BatchMode=yes", "10.0.0.2"]
    assert "exec env VLLM_PLUGINS=halfbyte" in second.command()[4]


def test_names_are_no_addresses_and_this_machine_needs_no_variables() -> None:
    named = node_launches(LAUNCH, ("spark1", "spark2"), 2, Network("eth1", None))
    assert "VLLM_HOST_IP" not in named[1].launch.environment
    assert "NCCL_IB_HCA" not in named[1].launch.environment
    assert named[1].launch.environment["NCCL_SOCKET_IFNAME"] == "eth1"
    here = node_launches(LAUNCH, ("localhost", "localhost"), 2)
    assert all(node.is_local for node in here)
    assert set(here[1].launch.environment) == {"VLLM_PLUGINS"}


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"--tp is 3, .* 2 machines"):
        node_launches(LAUNCH, ("a", "b"), 3)
    for text in ("", "a", "a,", ",b"):
        with pytest.raises(UsageError, match="--nodes"):
            parse_nodes(text)


def test_ray() -> None:
    lines = ray_lines(LAUNCH, ("a", "b"), 2)
    assert lines[0] == "ray start --head --node-ip-address a --port 6379"
    assert lines[1] == "ssh b ray start --address a:6379"
    assert lines[2].endswith("--distributed-executor-backend ray")


def serve(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *words])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_dry_run() -> None:
    code, said = serve("--engine", "vllm", "--preset", "fast", "--dry-run")
    assert code == 0
    assert "serve" in said
    assert "--additional-config" in said
    code, said = serve("--engine", "vllm", "--nodes", "localhost,other", "--tp", "2", "--dry-run")
    assert (code, said.count("--nnodes 2")) == (0, 2)
    assert "--headless" in said
    code, said = serve("--engine", "vllm", "--nodes", "a,b", "--tp", "2", "--ray", "--dry-run")
    assert "ray start --head" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--dry-run",), "are for --engine vllm"),
        (("--tp", "2"), "are for --engine vllm"),
        (("--engine", "sglang"), "use halfbyte or vllm"),
        (("random:20b", "--engine", "vllm", "--dry-run"), "reads a Hugging Face model folder"),
        (("--engine", "vllm", "--sinks", "off", "--dry-run"), "garbage without sinks"),
        (("--engine", "vllm", "--ray"), "add --dry-run"),
        (("--engine", "vllm", "--vllm", "--quantization nvfp4", "--dry-run"), "--quantization nvfp4"),
        (("--engine", "vllm", "--vllm", "--port 9"), "--port is a flag of vLLM's own server"),
        (("models/tiny", "--engine", "vllm", "--vllm", "vllm serve other"), "name the model other"),
    ],
)
def test_refusals(words: tuple[str, ...], sentence: str) -> None:
    code, said = serve(*words)
    assert code != 0
    assert sentence in said


async def test_a_machine_that_ends_ends_the_engine_with_a_sentence() -> None:
    ended: list[str] = []
    engine: Any = SimpleNamespace(end=ended.append, health=lambda: SourceHealth())
    stays, goes = (Node("localhost", r, VllmLaunch(("sh", "-c", c), {})) for r, c in ((1, "sleep 600"), (2, "exit 3")))
    others = Others([stays, goes])
    others.start()
    try:
        await others._until_one_ends(engine)
        assert ended == ["vLLM on localhost (node 2) ended with exit status 3; the others end, too."]
        assert all(process.poll() is not None for process in others.processes)
    finally:
        others.stop()


async def test_an_engine_that_is_gone_ends_the_other_machines() -> None:
    ended: list[str] = []
    engine: Any = SimpleNamespace(end=ended.append, health=lambda: SourceHealth("it died", gone=True))
    others = Others([Node("localhost", 1, VllmLaunch(("sleep", "600"), {}))])
    others.start()
    try:
        await others._until_one_ends(engine)
        assert ended == ["vLLM's first node is gone: it died."]
        assert others.processes[0].poll() is not None
    finally:
        others.stop()
