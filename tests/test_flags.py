"""An option of `serve`, `bench` or `check` is listed once, in its record, and what is typed arrives there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from halfbyte.cli import app as cli
from halfbyte.cli.options import with_gates, with_record
from halfbyte.engine.options import EngineOptions
from halfbyte.errors import UsageError
from halfbyte.flags import flags_of
from halfbyte.gates import Gates
from halfbyte.lab.options import (
    BenchOptions,
    CheckOptions,
    EngineStart,
    QualityOptions,
    StressCounts,
    WorkloadOptions,
    Works,
)
from halfbyte.server.settings import ServerSettings

RECORDS = (ServerSettings, EngineOptions)
# What is typed for each flag, and what the record must hold then. A flag that is missing here fails the test.
TYPED: dict[str, tuple[list[str], Any]] = {
    "host": (["0.0.0.0"], "0.0.0.0"),
    "port": (["8123"], 8123),
    "uds": (["/run/halfbyte.sock"], "/run/halfbyte.sock"),
    "ssl_certfile": (["cert.pem"], "cert.pem"),
    "ssl_keyfile": (["key.pem"], "key.pem"),
    "model_name": (["m"], "m"),
    "aliases": (["a", "b"], ("a", "b")),
    "any_model": ([], True),
    "cors_origins": (["http://x"], ("http://x",)),
    "max_body_bytes": (["0.5"], 1 << 19),
    "max_requests": (["7"], 7),
    "max_sequences_per_request": (["5"], 5),
    "max_sequences_per_client": (["6"], 6),
    "request_timeout": (["2.5"], 2.5),
    "default_effort": (["HIGH"], "high"),
    "max_reasoning_tokens": (["900"], 900),
    "drain_seconds": (["3"], 3.0),
    "log_prompts": ([], True),
    "page": ([], False),
    "bind_tools": ([], False),
    "allow_nan": ([], True),
    "record": (["kernels.json"], "kernels.json"),
    "allow_hosts": (["box", "box.lan"], ("box", "box.lan")),
    "silence_seconds": (["50"], 50.0),
    "max_connections": (["99"], 99),
    "max_connections_per_address": (["33"], 33),
    "hang_seconds": (["12"], 12.0),
    "warm_up": (["fast"], "fast"),
    "self_test": (["always"], "always"),
    "max_context": (["4096"], 4096),
    "max_seqs": (["3"], 3),
    "max_rows_per_step": (["512"], 512),
    "max_rows_with_decode": (["256"], 256),
    "max_rows_in_burst": (["1024"], 1024),
    "kv_gib": (["1.5"], 1.5),
    "gpu_memory": (["24GiB"], 24 << 30),
    "reserve_gib": (["0.25"], 0.25),
    "draft": (["d"], "d"),
    "log_format": (["json"], "json"),
    "page_cache": (["drop"], "drop"),
    "prefix_memory": (["1.5GiB"], 3 << 29),
    "prefix_folder": (["prefixes"], "prefixes"),
    "prefix_disk": (["500MB"], 500_000_000),
    "prefix_shared": ([], True),
}


def run(arguments: list[str]) -> tuple[ServerSettings, EngineOptions]:
    records: list[Any] = []

    @with_gates
    @with_record("options", EngineOptions)
    @with_record("settings", ServerSettings)
    def command(*, settings: ServerSettings, options: EngineOptions, gates: Gates) -> None:
        records.extend((settings, options))

    application = typer.Typer()
    application.command()(command)
    result = CliRunner().invoke(application, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return records[0], records[1]


def test_nothing_typed_is_the_records_defaults() -> None:
    assert run([]) == (ServerSettings(), EngineOptions())


def test_what_is_typed_reaches_the_record() -> None:
    assert {name for record in RECORDS for name in flags_of(record)} == set(TYPED)
    arguments = []
    for record in RECORDS:
        for name, (flag, _) in flags_of(record).items():
            typed = TYPED[name][0]
            option = flag.name.split("/")[-1]  # the second end of a switch is the one that changes something
            arguments += [part for value in typed for part in (option, value)] if typed else [option]
    settings, options = run(arguments)
    for name, (_, value) in TYPED.items():
        assert getattr(settings if hasattr(settings, name) else options, name) == value, name


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        (["--max-model-len", "4096"], "max_context", 4096),
        (["--served-model-name", "m"], "model_name", "m"),
        (["--max-num-seqs", "3"], "max_seqs", 3),
        (["--max-num-batched-tokens", "512"], "max_rows_per_step", 512),
        (["--max-tokens-beside-decode", "256"], "max_rows_with_decode", 256),
    ],
)
def test_what_other_servers_call_it_is_taken_too(typed: list[str], field: str, value: object) -> None:
    settings, options = run(typed)
    assert getattr(settings if hasattr(settings, field) else options, field) == value


def test_serve_takes_every_flag_once() -> None:
    serve = get_command(cli.app).get_command(None, "serve")  # type: ignore[attr-defined]
    names = [name for p in serve.params for name in (*p.opts, *p.secondary_opts)]
    assert "--port" in names
    assert len(names) == len(set(names))
    for record in RECORDS:
        for flag, _ in flags_of(record).values():
            assert {*flag.name.split("/"), *flag.spellings} <= set(names), flag
    assert {"--api-key", "--gpu-memory-utilization", "--tensor-parallel-size"} <= set(names)


def test_an_unknown_effort_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="there is no effort 'Huge'; use none, low, medium, high"):
        run(["--effort", "Huge"])


# ---- bench, check and matrix -----------------------------------------------------------------------------------------

NUMBERS = {
    "prompts": (["16,32"], (16, 32)), "tokens": (["4"], (4,)), "depths": (["0,64"], (0, 64)),
    "concurrency": (["1,2"], (1, 2)), "repeats": (["7"], 7),
}  # fmt: skip
LAB: dict[type[Any], dict[str, tuple[list[str], Any]]] = {
    BenchOptions: {
        **NUMBERS, "out": (["r.json"], Path("r.json")), "served": ([], True), "url": (["http://x"], "http://x"),
        "engine": (["vllm"], "vllm"), "resume": ([], True), "store": (["s"], Path("s")), "eager": ([], True),
        "gpu_memory": (["24GiB"], 24 << 30),
        "graph": ([], True), "phases": (["1,8"], (1, 8)), "sustain": (["2.5"], 2.5), "check": ([], False),
        "require_native": ([], True), "self_test": (["off"], "off"),
    },
    WorkloadOptions: {
        "workload": (["chat"], "chat"), "rates": (["0.5,2"], (0.5, 2.0)), "sessions": (["9"], 9),
        "turns": (["3"], 3), "limits": (["ttft=1"], "ttft=1"), "pace": (["2"], 2.0), "seed": (["5"], 5),
    },
    EngineStart: {
        "flags": (["--a", "b"], ("--a", "b")), "environment": (["A=1", "B=2"], ("A=1", "B=2")),
        "python": (["/p"], "/p"),
    },
    CheckOptions: {
        "engine": (["sglang"], "sglang"), "engine_log": (["l"], Path("l")), "trace": (["t"], Path("t")),
        "baseline": (["fast"], "fast"), "reference": (["r"], Path("r")), "write_reference": (["w"], Path("w")),
        "suite": (["tiny"], "tiny"), "targets": (["t.json"], Path("t.json")), "prior": (["A,B"], ("A", "B")),
        "against": (["a"], Path("a")), "full": (["tile,sinks"], ("tile", "sinks")), "kit": (["k.zip"], Path("k.zip")),
        "minutes": (["2"], 2.0), "start_s": (["9"], 9.0), "request_s": (["8"], 8.0), "debug": ([], True),
        "resume": ([], True), "out": (["o"], Path("o")),
    },
    QualityOptions: {
        "presets": (["balanced,fast"], ("balanced", "fast")), "texts": (["a.txt", "b.txt"], ("a.txt", "b.txt")),
        "lengths": (["512,4096"], (512, 4096)),
    },
    Works: {**NUMBERS, "seed": (["5"], 5)},
    StressCounts: {n: (["3"], 3) for n in ("sequential", "prefill", "generation", "load", "at_once")},
}  # fmt: skip
COMMANDS = {
    "bench": (BenchOptions, WorkloadOptions, EngineStart),
    "check": (CheckOptions, EngineStart, Works, StressCounts, QualityOptions),
}


def made(record: type[Any], arguments: list[str]) -> Any:
    records: list[Any] = []

    @with_record("options", record)
    def command(*, options: Any) -> None:
        records.append(options)

    application = typer.Typer()
    application.command()(command)
    result = CliRunner().invoke(application, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return records[0]


@pytest.mark.parametrize("record", LAB, ids=lambda r: r.__name__)
def test_what_is_typed_reaches_a_record_of_the_lab(record: type[Any]) -> None:
    flags, typed = flags_of(record), LAB[record]
    assert set(flags) == set(typed)
    assert made(record, []) == record()
    arguments = []
    for name, (flag, _) in flags.items():
        option = flag.name.split("/")[-1]
        arguments += [part for value in typed[name][0] for part in (option, value)] if typed[name][0] else [option]
    options = made(record, arguments)
    assert {name: getattr(options, name) for name in typed} == {name: value for name, (_, value) in typed.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_bench_and_check_take_every_flag_once(name: str) -> None:
    command = get_command(cli.app).get_command(None, name)  # type: ignore[attr-defined]
    names = [n for p in command.params for n in (*p.opts, *p.secondary_opts)]
    assert len(names) == len(set(names))
    for record in COMMANDS[name]:
        for flag, _ in flags_of(record).values():
            assert {*flag.name.split("/"), *flag.spellings} <= set(names), flag


def test_matrix_takes_a_part_of_the_flags_of_check() -> None:
    matrix = get_command(cli.app).get_command(None, "matrix")  # type: ignore[attr-defined]
    names = {n for p in matrix.params for n in p.opts if n.startswith("--")}
    assert names == {"--engine", "--full", "--out", "--resume", "--device", "--json"}
