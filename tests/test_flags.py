"""An option of `serve` is listed once, in the record it goes to, and what is typed arrives there."""

from __future__ import annotations

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
    "request_timeout": (["2.5"], 2.5),
    "default_effort": (["HIGH"], "high"),
    "drain_seconds": (["3"], 3.0),
    "log_prompts": ([], True),
    "page": ([], False),
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
    "max_tokens": (["512"], 512),
    "beside_decode": (["256"], 256),
    "kv_gib": (["1.5"], 1.5),
    "reserve_gib": (["0.25"], 0.25),
    "draft": (["d"], "d"),
    "log_format": (["json"], "json"),
    "page_cache": (["drop"], "drop"),
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
        (["--max-num-batched-tokens", "512"], "max_tokens", 512),
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
