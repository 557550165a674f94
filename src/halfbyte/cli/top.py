"""`top`: a running server at a glance, from what it tells Prometheus. Changes nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from halfbyte.cli import servers
from halfbyte.cli.client import open_client
from halfbyte.cli.options import JsonOption, check_number, out, print_json
from halfbyte.errors import PeerError, UsageError
from halfbyte.server.settings import load_api_keys

ADDRESS = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Scrape:
    """The metrics at one moment: sums over labels, by sample name."""

    at: float
    values: dict[str, float]

    def get(self, name: str) -> float | None:
        return self.values.get(f"halfbyte_{name}")

    def value_of(self, name: str) -> float:
        return self.get(name) or 0.0


@dataclass(frozen=True)
class View:
    """What is shown, between two scrapes. None: the server does not say, or nothing happened to say it of."""

    model: str
    version: str
    ready: bool
    up_seconds: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    streams: int  # in the engine's batch
    waiting: int
    admitted: int  # by the server, queue included
    kv_use: float
    kv_pages: int
    prefix_hits: float | None
    acceptance: float | None
    first_token_seconds: float | None  # mean of the requests that ended in between
    queue_seconds: float | None
    refused_per_second: float
    memory_available: int
    memory_total: int
    unified: bool
    pressure: float | None
    swap_used: int
    device_memory_free: int | None
    device_memory_total: int | None
    watts: float | None
    watts_limit: float | None
    mhz: float | None
    celsius: float | None


def scrape(text: str, at: float) -> Scrape:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return Scrape(at, values)


def view(version: dict[str, Any], before: Scrape, now: Scrape) -> View:
    """Rates are those between the two; a server that was started again in between begins at zero."""
    seconds = max(now.at - before.at, 1e-9)

    def grown(name: str) -> float:
        return max(0.0, now.value_of(name) - before.value_of(name))

    def share(part: str, total: str) -> float | None:
        """The share in what happened in between, or in the server's lifetime if nothing did."""
        if grown(total):
            return grown(part) / grown(total)
        return now.value_of(part) / now.value_of(total) if now.value_of(total) else None

    def mean(name: str) -> float | None:
        return grown(f"{name}_sum") / grown(f"{name}_count") if grown(f"{name}_count") else None

    def count(name: str) -> int | None:
        value = now.get(name)
        return None if value is None else int(value)

    clock = now.get("device_clock_hertz")
    return View(
        model=str(version.get("model", "?")),
        version=str(version.get("version", "?")),
        ready=now.value_of("ready") == 1,
        up_seconds=max(0.0, time.time() - now.value_of("start_time_seconds")),
        tokens_per_second=grown("engine_generated_tokens_total") / seconds,
        prompt_tokens_per_second=grown("engine_prompt_tokens_total") / seconds,
        streams=int(now.value_of("requests_running")),
        waiting=int(now.value_of("requests_waiting")),
        admitted=int(now.value_of("requests_active")),
        kv_use=now.value_of("kv_use_ratio"),
        kv_pages=int(now.value_of("kv_pages")),
        prefix_hits=share("prefix_hit_tokens_total", "prefix_query_tokens_total"),
        acceptance=share("accepted_tokens_total", "drafted_tokens_total"),
        first_token_seconds=mean("time_to_first_token_seconds"),
        queue_seconds=mean("queue_time_seconds"),
        refused_per_second=grown("requests_refused_total") / seconds,
        memory_available=int(now.value_of("memory_available_bytes")),
        memory_total=int(now.value_of("memory_total_bytes")),
        unified=now.value_of("memory_unified") == 1,
        pressure=now.get("memory_pressure_ratio"),
        swap_used=int(now.value_of("swap_used_bytes")),
        device_memory_free=count("device_memory_free_bytes"),
        device_memory_total=count("device_memory_total_bytes"),
        watts=now.get("device_power_watts"),
        watts_limit=now.get("device_power_limit_watts"),
        mhz=None if clock is None else clock / 1e6,
        celsius=now.get("device_temperature_celsius"),
    )


class WatchedServer:
    """The server's side of it: two endpoints, one key."""

    def __init__(self, address: str, key: str | None = None, certificate: str | None = None) -> None:
        self.address = address.rstrip("/")
        self.client = open_client(self.address, certificate, key, timeout=TIMEOUT_S)

    def __enter__(self) -> WatchedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def get(self, path: str) -> httpx.Response:
        try:
            answer = self.client.get(path)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
            raise PeerError(f"no server answers at {self.address} ({e}); start one with `halfbyte serve`.") from None
        if answer.status_code == 401:
            raise UsageError(
                f"{self.address} asks for a key; name its file with --api-key-file or set HALFBYTE_API_KEY."
            )
        if answer.status_code != 200:
            raise PeerError(f"{self.address}{path} answered {answer.status_code}; is that a halfbyte server?")
        return answer

    def version(self) -> dict[str, Any]:
        try:
            version = self.get("/version").json()
        except ValueError:
            version = None
        if not isinstance(version, dict) or "model" not in version:
            raise PeerError(f"{self.address} does not answer as a halfbyte server does; check the address.")
        return version

    def scrape(self) -> Scrape:
        text = self.get("/metrics").text
        return scrape(text, time.monotonic())


def picture(v: View, address: str) -> RenderableType:
    state = Text("ready", style="green") if v.ready else Text("not ready", style="bold red")
    head = Text.assemble((v.model, "bold"), f"  {address}  halfbyte {v.version}  up {lasting(v.up_seconds)}  ", state)
    rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows.add_column(style="dim")
    rows.add_column(min_width=24)
    rows.add_column()

    def bar(part: float) -> ProgressBar:
        return ProgressBar(total=1.0, completed=min(1.0, max(0.0, part)), width=24)

    def percent(part: float | None) -> str:
        return "–" if part is None else f"{100 * part:.0f} %"

    def milliseconds(seconds: float | None) -> str:
        return "–" if seconds is None else f"{1000 * seconds:.0f} ms"

    rows.add_row(
        "tokens", f"[bold]{v.tokens_per_second:.1f}[/bold] tok/s", f"prompts {v.prompt_tokens_per_second:.0f} tok/s"
    )
    rows.add_row("streams", f"[bold]{v.streams}[/bold] running, {v.waiting} waiting", f"admitted {v.admitted}")
    rows.add_row("first token", milliseconds(v.first_token_seconds), f"in the queue {milliseconds(v.queue_seconds)}")
    rows.add_row("refused", f"{v.refused_per_second:.1f} a second", "")
    rows.add_row(
        "KV cache", bar(v.kv_use), f"{percent(v.kv_use)} of {v.kv_pages} pages, prefix hits {percent(v.prefix_hits)}"
    )
    rows.add_row("acceptance", percent(v.acceptance), "of drafted tokens")
    used = 1 - v.memory_available / v.memory_total if v.memory_total else 0.0
    kind = "unified memory" if v.unified else "memory"
    swap = f", swap {gib(v.swap_used)}" if v.swap_used else ""
    stalls = "" if v.pressure is None else f", stalls {percent(v.pressure)}"
    rows.add_row(kind, bar(used), f"{gib(v.memory_available)} of {gib(v.memory_total)} available{swap}{stalls}")
    if v.device_memory_total and v.device_memory_free is not None:
        share = 1 - v.device_memory_free / v.device_memory_total
        rows.add_row("GPU memory", bar(share), f"{gib(v.device_memory_free)} of {gib(v.device_memory_total)} free")
    if v.watts is not None:
        limit = "" if v.watts_limit is None else f" of {v.watts_limit:.0f}"
        clock = "" if v.mhz is None else f"{v.mhz:.0f} MHz"
        degrees = "" if v.celsius is None else f", {v.celsius:.0f} °C"
        rows.add_row("power", f"[bold]{v.watts:.0f}[/bold]{limit} W", f"{clock}{degrees}")
    else:
        rows.add_row("power", "–", "no GPU whose driver says it")
    return Group(head, rows)


def gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def lasting(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours}h" if days else f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s"


def top(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="SERVER",
            help="A model, process number or port, as `halfbyte ps` shows them, or the address of any server. "
            f"By default the one that runs on this machine, or {ADDRESS}.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[float, typer.Option(help="How many seconds to wait between updates.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading, taken over one interval, and exit.")] = False,
    json: JsonOption = False,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file whose first line is the server's API key; HALFBYTE_API_KEY works, too.")
    ] = None,
) -> None:
    """Watch a running server: tokens/s, streams, queue, KV cache, memory and power. Ctrl+C quits."""
    check_number(interval, "--interval")
    keys = () if api_key_file is None else load_api_keys(api_key_file)
    with meant(server, keys[0] if keys else None) as source:
        look(source, interval, once=once, json=json)


def meant(text: str | None, key: str | None) -> WatchedServer:
    """The server of an address, or one of this machine."""
    if text is not None and ("://" in text or text.startswith("unix:")):
        running = next((s for s in servers.running() if s.url == text), None)
        return WatchedServer(text, key, None if running is None else running.certificate)
    if text is None and not servers.running():
        return WatchedServer(ADDRESS, key)  # one in a container, perhaps
    chosen = servers.choose(text)
    if chosen.url is None:
        raise PeerError(f"{chosen.model} (process {chosen.pid}) is still loading; try again in a moment.")
    return WatchedServer(chosen.url, key, chosen.certificate)


def look(server: WatchedServer, interval: float, *, once: bool, json: bool) -> None:
    version, before = server.version(), server.scrape()

    def next_view() -> View:
        nonlocal before
        time.sleep(interval)
        now = server.scrape()
        seen = view(version, before, now)
        before = now
        return seen

    if json:
        while True:
            print_json(asdict(next_view()))
            if once:
                return
    if once:
        out.print(picture(next_view(), server.address))
        return
    if not sys.stdout.isatty():
        raise UsageError("a live view needs a terminal; use --once or --json.")
    watch(next_view, server.address)


def watch(next_view: Callable[[], View], address: str) -> None:
    with Live(console=out, auto_refresh=False, screen=True) as live:
        while True:
            try:
                live.update(picture(next_view(), address), refresh=True)
            except PeerError as e:  # it may be back in a moment
                live.update(Text(str(e), style="red"), refresh=True)


def register(app: typer.Typer) -> None:
    app.command()(top)
