"""`halfbyte top`: what it reads from a running server, makes of two looks, and says where there is no server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from live_server import Live
from rich.console import Console
from scripted import Play, ScriptedSource, say

from halfbyte.cli.top import Scrape, View, WatchedServer, lasting, picture, view
from halfbyte.engine.request import EngineStats
from halfbyte.errors import PeerError
from halfbyte.server.settings import ServerSettings

Run = Callable[..., tuple[int, str, str]]


class Busy(ScriptedSource):
    """Generates as long as it is looked at."""

    looks = 0

    def stats(self) -> EngineStats:
        self.looks += 1
        n = self.looks
        return EngineStats(
            running=3, waiting=2, kv_pages_total=200, kv_pages_used=50, generated_tokens=100 * n,
            prompt_tokens=1000 * n, drafted_tokens=40 * n, accepted_tokens=30 * n,
            prefix_hit_tokens=10 * n, prefix_query_tokens=20 * n,
        )  # fmt: skip


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve(Busy(lambda request, choice: Play(say("x"))))


def test_one_look_as_json(run: Run, live: Live) -> None:
    code, out, err = run("top", live.url, "--once", "--json", "--interval", "0.2")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == set(View.__dataclass_fields__)
    assert (found["model"], found["ready"], found["streams"], found["waiting"]) == ("gpt-oss-test", True, 3, 2)
    assert (found["kv_use"], found["kv_pages"]) == (0.25, 200)
    assert found["acceptance"] == pytest.approx(0.75)
    assert found["prefix_hits"] == pytest.approx(0.5)
    assert found["tokens_per_second"] > 0
    assert found["prompt_tokens_per_second"] == pytest.approx(10 * found["tokens_per_second"])
    assert found["watts"] is None
    assert found["memory_total"] > found["memory_available"] > 0


def test_one_look_for_people(run: Run, live: Live) -> None:
    code, out, _ = run("top", live.url, "--once", "--interval", "0.1")
    assert code == 0
    for part in ("gpt-oss-test", "ready", "tok/s", "3 running, 2 waiting", "25 % of 200 pages", "75 %", "power"):
        assert part in out


def scrapes(before: dict[str, float], now: dict[str, float], seconds: float = 2.0) -> tuple[Scrape, Scrape]:
    return Scrape(10.0, {f"halfbyte_{k}": v for k, v in before.items()}), Scrape(
        10.0 + seconds, {f"halfbyte_{k}": v for k, v in now.items()}
    )


def test_rates_are_those_between_two_looks() -> None:
    before, now = scrapes(
        {
            "engine_generated_tokens_total": 100,
            "time_to_first_token_seconds_sum": 1,
            "time_to_first_token_seconds_count": 2,
        },
        {
            "engine_generated_tokens_total": 300,
            "time_to_first_token_seconds_sum": 4,
            "time_to_first_token_seconds_count": 8,
        },
    )
    seen = view({"model": "m"}, before, now)
    assert (seen.tokens_per_second, seen.first_token_seconds) == (100.0, 0.5)
    assert (seen.acceptance, seen.queue_seconds, seen.watts) == (None, None, None)


def test_a_server_that_was_started_again_has_no_negative_rate() -> None:
    before, now = scrapes({"engine_generated_tokens_total": 1e6}, {"engine_generated_tokens_total": 10, "ready": 1})
    assert view({}, before, now).tokens_per_second == 0.0


def test_what_a_card_says_is_shown() -> None:
    before, now = scrapes(
        {}, {"device_power_watts": 312, "device_power_limit_watts": 700, "device_clock_hertz": 1.98e9,
             "device_temperature_celsius": 61, "device_memory_free_bytes": 1 << 30,
             "device_memory_total_bytes": 4 << 30, "memory_unified": 0,
             "memory_total_bytes": 8 << 30, "memory_available_bytes": 2 << 30}
    )  # fmt: skip
    seen = view({"model": "m", "version": "1"}, before, now)
    text = shown(seen)
    for part in (
        "not ready",
        "312 of 700 W",
        "1980 MHz, 61 °C",
        "1.0 GiB of 4.0 GiB free",
        "2.0 GiB of 8.0 GiB available",
    ):
        assert part in text
    assert "unified memory" in shown(replace(seen, unified=True, swap_used=1 << 30))
    assert "swap 1.0 GiB" in shown(replace(seen, swap_used=1 << 30))


def shown(seen: View) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(seen, "http://x"))
    console.file.close()
    return console.export_text()


def test_how_long() -> None:
    assert [lasting(s) for s in (5, 65, 3700, 90000)] == ["0m 05s", "1m 05s", "1h 01m", "1d 1h"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["http://127.0.0.1:9"], 1, "no server answers"),
        (["nonsense://x"], 1, "no server answers"),
        (["http://[bad"], 1, "no server answers"),
        (["--interval", "inf"], 2, "not a number"),
    ],
)
def test_no_server(run: Run, words: list[str], code: int, said: str) -> None:
    found, _, err = run("top", *words, "--once")
    assert (found, said in err) == (code, True), err
    assert len(err.strip().splitlines()) == 1


def test_a_key_is_asked_for_and_given(run: Run, serve: Callable[..., Live], tmp_path: Any) -> None:
    settings = ServerSettings(min_available_bytes=0, api_keys=("right",))
    live = serve(Busy(lambda request, choice: Play(say("x"))), settings)
    code, _, err = run("top", live.url, "--once")
    assert (code, "--api-key-file" in err) == (2, True)
    keys = tmp_path / "keys"
    keys.write_text("# mine\nright\n")
    assert run("top", live.url, "--once", "--json", "--interval", "0.1", "--api-key-file", str(keys))[0] == 0


def test_another_server_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    with WatchedServer("http://x", None) as server:
        monkeypatch.setattr(server.client, "get", lambda path: httpx.Response(200, text="<html>"))
        with pytest.raises(PeerError, match="does not answer as a halfbyte server"):
            server.version()
