"""`serve`: the engine in its own process behind an OpenAI- and Anthropic-compatible server."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import DeviceOption, LoadingBar, ModelArgument, announce, err, with_gates, with_record
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
    engine: Annotated[str, typer.Option(help="halfbyte; vllm comes with the plugin.")] = "halfbyte",
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
    if engine != "halfbyte":
        raise UsageError(f"--engine {engine} is not part of this version; leave it out.")
    if verbose:
        logging.getLogger("halfbyte").setLevel(logging.INFO)
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
