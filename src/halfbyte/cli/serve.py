"""`serve`: the engine in its own process behind an OpenAI- and Anthropic-compatible server."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import DeviceOption, LoadingBar, ModelArgument, announce, err, with_gates, with_record
from halfbyte.cli.serve_vllm import VllmChoice, serve_vllm
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import TokenSource
from halfbyte.engine.sizing import check_start
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.memory import read_memory
from halfbyte.model import checksums, load
from halfbyte.model.gpt_oss import arch_of
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server import run
from halfbyte.server.settings import ServerSettings, load_api_keys


@with_gates
@with_record("options", EngineOptions)
@with_record("settings", ServerSettings)
def serve(
    model: ModelArgument = None,
    api_key_file: Annotated[Path | None, typer.Option(help="One key per line; HALFBYTE_API_KEY works too.")] = None,
    engine: Annotated[str, typer.Option(help="halfbyte, or vllm: vLLM's engine with our kernels in it.")] = "halfbyte",
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="vLLM: GPUs that share each layer.", rich_help_panel="vLLM")
    ] = 1,
    nodes: Annotated[
        str | None, typer.Option(help="vLLM: machines, as host1,host2; the first one serves.", rich_help_panel="vLLM")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="vLLM: network interface between --nodes.", rich_help_panel="vLLM")
    ] = None,
    vllm: Annotated[str, typer.Option("--vllm", help="vLLM: further flags of its own.", rich_help_panel="vLLM")] = "",
    ray: Annotated[bool, typer.Option("--ray", help="vLLM: show the launch with Ray.", rich_help_panel="vLLM")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="vLLM: print the commands and run nothing.", rich_help_panel="vLLM")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="First hash the model's files against the record that `pull` wrote.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="One log line per request.")] = False,
    device: DeviceOption = None,
    *,
    settings: ServerSettings,
    options: EngineOptions,
    gates: Gates,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/responses, /v1/messages, and a chat page at /."""
    if engine not in ("halfbyte", "vllm"):
        raise UsageError(f"--engine is {engine!r}; use halfbyte or vllm.")
    if verbose:
        logging.getLogger("halfbyte").setLevel(logging.INFO)
    choice = VllmChoice(tp, nodes, vllm, interface, ray, dry_run)
    if engine == "vllm":
        key = gates_.setting("HALFBYTE_API_KEY")
        settings = replace(settings, api_keys=load_api_keys(api_key_file, [key] if key else []))
        serve_vllm(model, choice, settings, options, gates)
        return
    if choice != VllmChoice():
        raise UsageError(
            "--tp, --nodes, --interface, --vllm, --ray and --dry-run are for --engine vllm; leave them out."
        )
    resolved = load.resolve_model(model)
    where = load.resolve_device(device)
    if verify:
        verify_files(resolved)
    key = gates_.setting("HALFBYTE_API_KEY")
    keys = load_api_keys(api_key_file, [key] if key else [])
    options = replace(options, model=model, gates=gates, device=str(where))
    announce(gates, f"{resolved.label} on {where}", cpu=where.type == "cpu")
    weights = load.weight_bytes(resolved, gates)
    account = check_start(load.config_of(resolved), options, read_memory(where), arch_of(where), weights)
    settings = replace(settings, api_keys=keys, min_available_bytes=account.state.floor(account.reserve))
    name = settings.model_name or resolved.label

    async def source() -> tuple[TokenSource, Tokenizer]:
        with err.status(f"loading {resolved.label}") as status:

            def progress(doing: str) -> None:
                status.update(f"loading {resolved.label}: {doing}")

            return await EngineProcess.start(options, hang=settings.hang_seconds, progress=progress), load.tokenizer_of(
                resolved
            )

    run.serve(settings, source, started=lambda url: err.print(f"serving [bold]{name}[/bold] at {url}"))


def verify_files(model: load.ModelName) -> None:
    if model.path is None:
        raise UsageError(f"{model.text} has no files to verify; leave --verify out.")
    with LoadingBar(f"verifying {model.label}") as progress:
        count = checksums.verify(model.path, progress)
    err.print(f"[dim]{count} files are as they were pulled[/dim]")


def register(app: typer.Typer) -> None:
    app.command()(serve)
