"""`serve`: the engine in its own process behind an OpenAI- and Anthropic-compatible server."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import DeviceOption, ModelArgument, announce, err, with_gates
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import TokenSource
from halfbyte.engine.sizing import check_start
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.memory import read_memory
from halfbyte.model import load
from halfbyte.model.gpt_oss import arch_of
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server import run
from halfbyte.server.settings import Effort, MiB, ServerSettings, load_api_keys


@with_gates
def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on; this machine only by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="The name clients see.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Further names for the same model.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="One key per line; HALFBYTE_API_KEY works too.")] = None,
    cors: Annotated[list[str] | None, typer.Option(help="Origins that browsers may call from.")] = None,
    max_context: Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and answer together.")] = None,
    max_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once; more wait.")] = 64,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Rows of one step: chunk of a long prompt. Default: by the device.")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Running and waiting; one more is answered 429.")] = 256,
    kv_memory: Annotated[float | None, typer.Option(help="GiB of KV cache; default: what is free.")] = None,
    reserve: Annotated[float | None, typer.Option(help="GiB of memory that stays free.")] = None,
    draft: Annotated[str | None, typer.Option(help="Model or head that --speculate draft or eagle3 uses.")] = None,
    engine: Annotated[str, typer.Option(help="halfbyte; vllm comes with the plugin.")] = "halfbyte",
    any_model: Annotated[bool, typer.Option("--any-model", help="Answer whatever model name a client sends.")] = False,
    effort: Annotated[str, typer.Option(help="Reasoning effort where a request names none.")] = "medium",
    max_body: Annotated[float, typer.Option(min=0.001, help="MiB a request body may have.")] = 32.0,
    timeout: Annotated[float | None, typer.Option(help="Seconds a request may take.")] = None,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds SIGTERM waits for running requests.")] = 30.0,
    page: Annotated[bool, typer.Option("--page/--no-page", help="The chat page at /.")] = True,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="One log line per request.")] = False,
    device: DeviceOption = None,
    *,
    gates: Gates,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/responses, /v1/messages, and a chat page at /."""
    if engine != "halfbyte":
        raise UsageError(f"--engine {engine} is not part of this version; leave it out.")
    if effort.lower() not in get_args(Effort):
        raise UsageError(f"there is no effort {effort!r}; use {', '.join(get_args(Effort))}.")
    if verbose:
        logging.getLogger("halfbyte").setLevel(logging.INFO)
    resolved = load.resolve_model(model)
    where = load.resolve_device(device)
    key = gates_.setting("HALFBYTE_API_KEY")
    settings = ServerSettings(
        host=host,
        port=port,
        model_name=name,
        aliases=tuple(alias or ()),
        api_keys=load_api_keys(api_key_file, [key] if key else []),
        cors_origins=tuple(cors or ()),
        max_requests=max_requests,
        any_model=any_model,
        default_effort=cast(Effort, effort.lower()),
        max_body_bytes=int(max_body * MiB),
        request_timeout=timeout,
        drain_seconds=drain,
        page=page,
        log_prompts=log_prompts,
    )
    options = EngineOptions(
        model=model,
        gates=gates,
        device=str(where),
        max_context=max_context,
        max_seqs=max_seqs,
        max_tokens=max_tokens_per_step,
        kv_gib=kv_memory,
        reserve_gib=reserve,
        draft=draft,
    )
    announce(gates, f"{resolved.label} on {where}")
    weights = load.weight_bytes(resolved, gates)
    account = check_start(load.config_of(resolved), options, read_memory(where), arch_of(where), weights)
    settings = replace(settings, min_available_bytes=account.state.floor(account.reserve))

    async def source() -> tuple[TokenSource, Tokenizer]:
        with err.status(f"loading {resolved.label}"):
            return await EngineProcess.start(options), load.tokenizer_of(resolved)

    run.serve(
        settings, source, started=lambda url: err.print(f"serving [bold]{name or resolved.label}[/bold] at {url}")
    )


def register(app: typer.Typer) -> None:
    app.command()(serve)
