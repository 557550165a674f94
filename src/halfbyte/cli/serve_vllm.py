"""`serve --engine vllm`: vLLM with our plugin in it behind our own server; over several machines, vLLM's own launch."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import Activity, announce, err, out
from halfbyte.cli.serve import run_server
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import TokenSource
from halfbyte.engine.vllm_core import FACTORY, VllmOptions
from halfbyte.errors import PeerError, UsageError
from halfbyte.gates import Gates, as_stored
from halfbyte.model import load
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.settings import ServerSettings
from halfbyte.vllm_plugin import nodes as nodes_
from halfbyte.vllm_plugin.launch import Serving, VllmLaunch, behind_our_server, vllm_command
from halfbyte.vllm_plugin.nodes import Network, Node
from halfbyte.vllm_plugin.older_names import read_arguments

LOADING_S = 1800.0  # vLLM may compile for minutes without a word


@dataclass(frozen=True)
class VllmChoice:
    """Options of `serve` that only vLLM takes."""

    tp: int = 1
    nodes: str | None = None
    flags: str = ""  # further flags of vLLM's own
    interface: str | None = None
    ray: bool = False
    dry_run: bool = False


def serve_vllm(
    model: str | None, choice: VllmChoice, settings: ServerSettings, options: EngineOptions, gates: Gates
) -> None:
    flags = shlex.split(choice.flags)
    named = read_arguments(flags).model
    if named is not None and model not in (None, named):
        raise UsageError(
            f"the flags for vLLM name the model {named}, and the command names {model}; give only one of them."
        )
    resolved = load.resolve_model(model or named)
    if resolved.path is None or not resolved.path.is_dir():
        raise UsageError(f"--engine vllm reads a Hugging Face model folder, and {resolved.text} is none.")
    if options.prefix_memory is not None or options.prefix_folder is not None:
        raise UsageError("--prefix-memory and --prefix-folder are for halfbyte's own engine; leave them out with vLLM.")
    record = None if options.record is None else Path(options.record).absolute()
    if record is None and not choice.dry_run:  # the proof reads it where vLLM's workers are other processes
        record = Path(tempfile.mkdtemp(prefix="halfbyte-vllm-")) / "ran.json"
    hosts = nodes_.parse_nodes(choice.nodes) if choice.nodes else ()
    serving = Serving(
        max_context=options.max_context, max_seqs=options.max_seqs, max_tokens_per_step=options.max_rows_per_step,
        tensor_parallel=choice.tp if choice.tp > 1 else None, draft=options.draft, record=record,
    )  # fmt: skip
    launch = vllm_command(str(resolved.path), gates, serving=serving, arguments=flags, environment=gates_.inherited())
    launch = replace(
        launch, command=(*launch.command[:4], str(resolved.path), *launch.command[5:])
    )  # a name is a folder
    launch = (launch if choice.dry_run else behind_our_server(launch)).check()
    for note in launch.notes:
        err.print(f"[dim]{note}[/dim]")
    network = None if choice.interface is None else Network(choice.interface, None)
    machines = nodes_.node_launches(launch, hosts, choice.tp, network) if hosts else []
    if choice.dry_run:
        show(launch, machines, choice, hosts)
        raise typer.Exit
    if choice.ray:
        raise UsageError("--ray shows the launch and does not run it; add --dry-run, and start it by hand.")
    announce(as_stored(gates), f"{resolved.label} in vLLM{f' on {len(hosts)} machines' if hosts else ''}")
    first = machines[0].launch if machines else launch
    vllm = VllmOptions(
        str(resolved.path),
        resolved.label,
        first.command[5:],
        gates.as_dict(),
        dict(first.environment),
        None if record is None else str(record),
    )

    async def source() -> tuple[TokenSource, Tokenizer]:
        process = EngineProcess(
            FACTORY, vllm, hang=settings.hang_seconds, hang_loading=LOADING_S, restarts=0 if hosts else 8,
            log_format=settings.log_format,
        )  # fmt: skip
        others = Others(machines[1:])
        others.start()
        with Activity(f"loading {resolved.label} in vLLM", spinner=False):
            opening = asyncio.ensure_future(process.open())
            await others.until(opening)
        others.watch(process)
        return process, load.tokenizer_of(resolved)

    if options.draft is not None:  # vLLM makes no masks beside a draft model
        settings = replace(settings, bind_tools=False)
    run_server(settings, resolved, "vllm", source)


def show(launch: VllmLaunch, machines: Sequence[Node], choice: VllmChoice, hosts: Sequence[str]) -> None:
    """What would run, as lines for terminals."""
    if choice.ray:
        lines = nodes_.ray_lines(launch, hosts or ("localhost",), choice.tp)
    else:
        lines = nodes_.lines(machines) if machines else [launch.shell()]
    for line in lines:
        out.print(line, markup=False)


class Others:
    """The headless processes of the other machines. One that ends takes the rest with it, and says so."""

    def __init__(self, machines: Sequence[Node]) -> None:
        self.machines = machines
        self.processes: list[subprocess.Popen[bytes]] = []
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        for node in self.machines:
            environment = node.launch.child_environment() if node.is_local else None
            self.processes.append(subprocess.Popen(node.command(), env=environment, stdin=subprocess.DEVNULL))

    def ended(self) -> str | None:
        for node, process in zip(self.machines, self.processes):
            code = process.poll()
            if code is not None:
                end = f"signal {-code}" if code < 0 else f"exit status {code}"
                return f"vLLM on {node.host} (node {node.rank}) ended with {end}; the others end, too."
        return None

    async def until(self, opening: asyncio.Future[None]) -> None:
        """The engine is open, or one of the others ended first."""
        try:
            while not opening.done():
                await asyncio.wait({opening}, timeout=1.0)
                if (why := self.ended()) is not None and not opening.done():
                    opening.cancel()
                    with suppress(asyncio.CancelledError):
                        await opening
                    raise PeerError(why)
            await opening
        except BaseException:
            self.stop()
            raise

    def watch(self, process: EngineProcess) -> None:
        if self.processes:
            self._watch = asyncio.create_task(self._until_one_ends(process), name="halfbyte-vllm-nodes")

    async def _until_one_ends(self, process: EngineProcess) -> None:
        while (why := self.ended()) is None:
            if process.health().gone:
                why = f"vLLM's first node is gone: {process.health().trouble}."
                break
            await asyncio.sleep(1.0)
        err.print(why)
        process.end(why)
        self.stop()

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
