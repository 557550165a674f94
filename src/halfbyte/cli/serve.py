"""`serve`: the engine in its own process behind an OpenAI- and Anthropic-compatible server."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte import gates as gates_
from halfbyte import log_lines
from halfbyte.cli.options import (
    Activity,
    DeviceOption,
    LoadingBar,
    ModelArgument,
    announce_model,
    err,
    with_gates,
    with_record,
)
from halfbyte.engine.options import EngineOptions
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.server.settings import ServerSettings, load_api_keys

if TYPE_CHECKING:
    from halfbyte.engine.request import TokenSource
    from halfbyte.memory import MemoryState
    from halfbyte.model.load import ModelName
    from halfbyte.model.tokenizer import Tokenizer
    from halfbyte.server.run import SourceFactory

VLLM = "With --engine vllm alone"


@with_gates
@with_record("options", EngineOptions, panel="Engine")
@with_record("settings", ServerSettings, panel="Server")
def serve(
    model: ModelArgument = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="A key that clients must send; repeat it for more. Others on this machine can read it in the list of "
            "processes: --api-key-file and HALFBYTE_API_KEY keep it to yourself.",
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key on each line.")] = None,
    memory_share: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-utilization",
            min=0.05,
            max=1.0,
            help="The share of the memory that may be used, from 0 to 1, as vLLM has it; --reserve says the rest.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="halfbyte, or vllm: vLLM's engine with our kernels in it.")] = "halfbyte",
    tp: Annotated[
        int,
        typer.Option("--tp", "--tensor-parallel-size", min=1, help="GPUs that share each layer.", rich_help_panel=VLLM),
    ] = 1,
    nodes: Annotated[
        str | None,
        typer.Option(help="The machines, for example host1,host2; the first one serves.", rich_help_panel=VLLM),
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="The network interface between --nodes.", rich_help_panel=VLLM)
    ] = None,
    vllm: Annotated[str, typer.Option("--vllm", help="Further flags of vLLM's own.", rich_help_panel=VLLM)] = "",
    ray: Annotated[bool, typer.Option("--ray", help="Show how to launch it with Ray.", rich_help_panel=VLLM)] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands and run nothing.", rich_help_panel=VLLM)
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="First check the model's files against the hashes that `pull` recorded.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log one line for each request, and say more about what runs.")
    ] = False,
    device: DeviceOption = None,
    *,
    settings: ServerSettings,
    options: EngineOptions,
    gates: Gates,
) -> None:
    """Serve a model: OpenAI's and Anthropic's APIs, and a chat page at /."""
    from halfbyte.cli.serve_vllm import VllmChoice, serve_vllm
    from halfbyte.model import load

    if engine not in ("halfbyte", "vllm"):
        raise UsageError(f"--engine is {engine!r}; use halfbyte or vllm.")
    if verbose:
        logging.getLogger("halfbyte").setLevel(logging.INFO)
    if settings.log_format == "json":
        log_lines.use_json("server")
        err.quiet = True  # what is said to people would stand between the lines
    keys = [*(api_key or ()), *filter(None, [gates_.setting("HALFBYTE_API_KEY")])]
    settings = replace(settings, api_keys=load_api_keys(api_key_file, keys))
    choice = VllmChoice(tp, nodes, vllm, interface, ray, dry_run)
    if engine == "vllm":
        flags = vllm if memory_share is None else f"{vllm} --gpu-memory-utilization {memory_share}"
        serve_vllm(model, replace(choice, flags=flags), settings, options, gates)
        return
    if choice != VllmChoice():
        raise UsageError(
            "--tp, --nodes, --interface, --vllm, --ray and --dry-run are for --engine vllm; leave them out."
        )
    resolved = load.resolve_model(model)
    where = load.resolve_device(device)
    from halfbyte.engine.placement import find_placement
    from halfbyte.engine.process import EngineProcess
    from halfbyte.engine.sizing import check_start, keeps_cached
    from halfbyte.memory import read_memory
    from halfbyte.model.gpt_oss import arch_of
    from halfbyte.server import run

    memory = read_memory(where).limited_to(options.gpu_memory)
    if verify:
        verify_files(resolved, keep_cached=keeps_cached(options, memory))
    options = replace(options, model=model, gates=gates, device=str(where))
    if memory_share is not None:
        options = replace(options, reserve_gib=rest_of_memory(memory_share, options, memory))
    checkpoint = load.OpenCheckpoint(resolved)
    facts = checkpoint.facts
    placement = find_placement(facts, options, memory, arch_of(where))
    options = replace(options, gates=placement.gates)
    account = check_start(facts.config, options, memory, arch_of(where), placement.device_bytes)
    settings = replace(settings, min_available_bytes=account.state.floor(account.reserve))
    settings = replace(settings, last_available_bytes=account.state.last(account.reserve))
    if settings.uds is None:
        run.bind(settings).close()  # a port in use is said before kernels are compiled, as a first start does
    announce_model(facts, gates, where, verbose=verbose)
    if placement.line:
        err.print(placement.line, highlight=False)

    async def source() -> tuple[TokenSource, Tokenizer]:
        with Activity(f"loading {resolved.label}", spinner=False) as status:  # the engine's process logs beside it

            def progress(doing: str) -> None:
                status.update(f"loading {resolved.label}: {doing}")

            engine = await EngineProcess.start(
                options, hang=settings.hang_seconds, progress=progress, log_format=settings.log_format
            )
            with checkpoint:
                return engine, checkpoint.tokenizer()

    run_server(settings, resolved, str(where), source)


def run_server(settings: ServerSettings, model: ModelName, device: str, source: SourceFactory) -> None:
    """Serve until a signal, known to `ps` and `stop` for as long, and under the name it was asked for."""
    from halfbyte.cli import servers
    from halfbyte.server import run

    if model.repo is not None:
        settings = replace(settings, aliases=(*settings.aliases, model.repo))
    name = settings.model_name or model.label
    names = {name, model.label, *settings.aliases, *servers.names_of(model.text, model.repo)}
    path = None if model.path is None else str(model.path.absolute())
    certificate = None if settings.ssl_certfile is None else str(Path(settings.ssl_certfile).absolute())
    with servers.listed(name, tuple(sorted(names)), path, device, certificate) as listing:

        def started(url: str) -> None:
            listing.started(url)
            err.print(f"serving [bold]{name}[/bold] at {url}")

        run.serve(settings, source, started=started)


def rest_of_memory(share: float, options: EngineOptions, memory: MemoryState) -> float:
    """GiB that stay free where only a share of the memory may be used."""
    if options.reserve_gib is not None:
        raise UsageError("--gpu-memory-utilization and --reserve say the same thing; give only one of them.")
    return (1.0 - share) * memory.size / (1 << 30)


def verify_files(model: ModelName, *, keep_cached: bool) -> None:
    from halfbyte.model import checksums

    if model.path is None:
        raise UsageError(f"{model.text} has no files to verify; leave --verify out.")
    with LoadingBar(f"verifying {model.label}") as progress:
        count = checksums.verify(model.path, progress, keep_cached=keep_cached)
    err.print(f"[dim]{count} files are as they were pulled[/dim]")


def register(app: typer.Typer) -> None:
    app.command()(serve)
