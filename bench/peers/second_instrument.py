"""Our client and llama-benchy on the same server in the same run: do two instruments see the same speed?

    python -m bench run second-instrument            the embedded model, served for the purpose
    python -m bench run second-instrument --set url=http://127.0.0.1:8000 --set tokenizer=models/tiny

Rounds alternate: some requests of ours, then a run of llama-benchy (PyPI, a process; nothing of it is imported), one
stream, chat completions, answers of exactly `tg` tokens. Compared are tokens a second after the first token, and the
time to the first token that can be read, twice. On the same requests: llama-benchy asks through a relay that notes when
each piece of an answer came by, and our reading of these pieces stands beside what llama-benchy says of them, so that
only the instruments differ. In turn: our client's requests of the same prompts afterwards; there the machine changes
between the two. Within 3 % they agree; where they do not, the result says what is known to make the difference."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.measurement import Run, measurement, option
from bench.peers.relay import Relay, Stream
from halfbyte.errors import PeerError, UsageError
from halfbyte.gates import child_environment
from halfbyte.lab import receipts
from halfbyte.lab.child import output_of
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.traffic import measure_traffic
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.lab.served import Served, serving
from halfbyte.lab.workloads.arrivals import ClosedLoop
from halfbyte.lab.workloads.workload import CHAT, OPENINGS, Session, Turn, Workload, repeated
from halfbyte.model import load

WITHIN = 0.03
BOOK = "http://text.of.this.run/book"  # never fetched: it lies in the cache folder that llama-benchy looks into first
WHY = {
    "same requests": (
        "its first token includes writing the request and aiohttp's connection, ours begins when the request has come "
        "whole; it counts tokens of chunks with text only; its times are taken when Python has come to read, ours a "
        "process earlier"
    ),
    "in turn": (
        "its own take part of the machine that they measure, as a client in Python does, ours less; one ran after the "
        "other, so what the machine did meanwhile is in the ratio; its first token includes aiohttp's connection; ours "
        "are medians, its own are means"
    ),
}


@dataclass(frozen=True)
class SpeedReading:
    """What an instrument says of some requests, one after the other."""

    speed: float  # tokens a second after the first
    ttft_ms: float  # to the first token with text


def run_benchy(url: str, model: str, tokenizer: Path, pp: int, tg: int, runs: int) -> SpeedReading:
    if importlib.util.find_spec("llama_benchy") is None:
        raise UsageError("this compares with llama-benchy: pip install llama-benchy.")
    with tempfile.TemporaryDirectory() as home:
        cache = Path(home) / ".cache" / "llama-benchy"
        cache.mkdir(parents=True)
        (cache / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt").write_text(_book(), encoding="utf-8")
        saved = Path(home) / "result.json"
        command = [
            sys.executable, "-m", "llama_benchy", "--base-url", f"{url}/v1", "--model", model, "--tokenizer",
            str(tokenizer.resolve()), "--pp", str(pp), "--tg", str(tg), "--runs", str(runs), "--exact-tg", "--no-cache",
            "--skip-coherence", "--book-url", BOOK, "--latency-mode", "none", "--format", "json", "--save-result",
            str(saved),
            "--extra-body", "temperature=0",
        ]  # fmt: skip
        output = output_of(command, env=child_environment(HOME=home, HF_HUB_OFFLINE="1"))
        if not saved.is_file():
            raise PeerError(f"llama-benchy left no result: {output[-400:].strip()}")
        return read_benchy(json.loads(saved.read_text(encoding="utf-8")), output)


def read_benchy(raw: Any, output: str = "") -> SpeedReading:
    try:
        (run,) = raw["benchmarks"]
        return SpeedReading(float(run["tg_throughput"]["mean"]), float(run["e2e_ttft"]["mean"]))
    except (KeyError, TypeError, ValueError) as e:
        raise PeerError(
            f"llama-benchy has no figure ({type(e).__name__}: {e}); it said: {output[-600:].strip()}"
        ) from None


def _book() -> str:
    """Plain sentences, more than any prompt needs."""
    draw = random.Random("a book")
    return " ".join(draw.choice(OPENINGS) for _ in range(20_000))


def workload(streams: Sequence[Stream], tg: int) -> Workload:
    """llama-benchy's own prompts, each with a number in front, so that no prefix of them is in the server's cache."""
    sessions = [Session((Turn(CHAT, {"messages": s.request["messages"]}, tg),)) for s in streams]
    marked = repeated(sessions, "chat", {})
    return Workload("chat", lambda k: marked.session(k + len(sessions)))


def compare(
    url: str, tokenizer: Path, pp: int, tg: int, runs: int, rounds: int, cell: Cell, client: HttpClient | None = None
) -> list[Result]:
    client = client or HttpClient(url)
    benchy: list[SpeedReading] = []
    own: dict[str, list[SpeedReading]] = {"same requests": [], "in turn": []}
    for _ in range(rounds):
        with Relay(url) as relay:
            benchy.append(run_benchy(relay.url, client.model, tokenizer, pp, tg, runs))
        streams = relay.streams[1:]  # the first is its warm-up
        if len(streams) != runs:
            raise PeerError(f"llama-benchy was to ask for {runs} streams, and {len(streams)} came by.")
        own["same requests"].append(read_streams(streams))
        played = measure_traffic(client, workload(streams, tg), ClosedLoop(1, runs), cell)
        if played.refused:
            return [played]
        own["in turn"].append(SpeedReading(1e3 / played.figure("tpot_p50").value, played.figure("ttft_p50").value))
    return [result_of(how, name, own[how], benchy, cell) for how in own for name in ("speed", "ttft")]


def read_streams(streams: Sequence[Stream]) -> SpeedReading:
    """What we say of the answers that llama-benchy measured: means over its requests, as its own figures are."""
    speeds, firsts = [], []
    for stream in streams:
        answer = stream.read()
        assert answer.usable_at is not None
        speeds.append(sum(n for _, n in answer.arrivals[1:]) / (answer.last - answer.first))
        firsts.append(1e3 * (answer.usable_at - stream.sent))
    return SpeedReading(sum(speeds) / len(speeds), sum(firsts) / len(firsts))


def result_of(how: str, name: str, own: Sequence[SpeedReading], benchy: Sequence[SpeedReading], cell: Cell) -> Result:
    """`how` is one of WHY, `name` speed or ttft."""
    unit = "tok/s" if name == "speed" else "ms"
    a, b = ([s.speed if name == "speed" else s.ttft_ms for s in seen] for seen in (own, benchy))
    ratio = figure("ratio", "ratio", [x / y for x, y in zip(a, b, strict=True)])
    agree = abs(ratio.value - 1) <= WITHIN
    spread = f"{ratio.low:.3f} to {ratio.high:.3f} in {ratio.samples} rounds; what differs: {WHY[how]}"
    target = Check(f"two instruments agree within {WITHIN:.0%}", agree, ratio.value, 1.0, "" if agree else spread)
    case = replace(cell, kind="second instrument", path=name, shape={**cell.shape, "asked": how})
    return Result(case, (figure(name, unit, a), figure("llama_benchy", unit, b), ratio), targets=(target,))


@dataclass(frozen=True)
class Options:
    url: str | None = option(None, "a running server; empty: the embedded model is served")
    tokenizer: Path = option(load.EMBEDDED, "folder or file that llama-benchy reads")
    pp: int = 256
    tg: int = 64
    runs: int = 5
    rounds: int = 3


@measurement("second-instrument", needs=("llama-benchy",), seconds=900, routine=False)
def second_instrument(run: Run, options: Options) -> None:
    shape = {"pp": options.pp, "tg": options.tg, "runs": options.runs}
    server = nullcontext(Served(options.url, "")) if options.url else serving("halfbyte", Setup(None), lambda _: None)
    client = [receipts.PACKAGE / "lab" / "measure" / "traffic.py", Path(__file__).with_name("relay.py")]
    run.sources |= receipts.hashes(receipts.sources_of(client, ("lab",)))
    with server as served:
        cell = Cell("second instrument", "" if options.url else "tiny", shape=shape, engine=served.name)
        counts = options.pp, options.tg, options.runs, options.rounds
        run.add(*compare(served.url, options.tokenizer, *counts, cell))
