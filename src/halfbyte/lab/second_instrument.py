"""Our client and llama-benchy on the same server in the same run: do two instruments see the same speed?

    python -m halfbyte.lab.second_instrument --url http://127.0.0.1:8000 --tokenizer models/tiny [--pp 256] [--tg 64]
    python -m halfbyte.lab.second_instrument                      the embedded model, served for the purpose

Rounds alternate: some requests of ours, then a run of llama-benchy (PyPI, a process; nothing of it is imported), one
stream, chat completions, answers of exactly `--tg` tokens. Compared are tokens a second after the first token, and the
time to the first token that can be read. Within 3 % they agree; where they do not, the result says what is known to
make the difference: prompts differ (llama-benchy cuts its own from a text), and so do the definitions that are listed
with it."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError, PeerError, UsageError
from halfbyte.gates import child_environment
from halfbyte.lab import receipts
from halfbyte.lab.child import output_of
from halfbyte.lab.entry import finish, line_of
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.traffic import measure_traffic
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.lab.served import Served, serving
from halfbyte.lab.workloads.arrivals import ClosedLoop
from halfbyte.lab.workloads.workload import CHAT, OPENINGS, Session, Turn, Workload
from halfbyte.model import load

WITHIN = 0.03
BOOK = "http://text.of.this.run/book"  # never fetched: it lies in the cache folder that llama-benchy looks into first
WHY = (
    "its first token includes aiohttp's connection, ours begins when the connection stands; it counts tokens of chunks "
    "with text only; its prompts are cut from a text to a length in tokens, ours are chats; a client in Python takes "
    "part of a small machine; rounds ran one after the other, so what the machine did between them is in the ratio"
)


@dataclass(frozen=True)
class Benchy:
    """What one run of llama-benchy said."""

    speed: float  # tokens a second after the first
    ttft_ms: float  # to the first token with text


def run_benchy(url: str, model: str, tokenizer: Path, pp: int, tg: int, runs: int) -> Benchy:
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
        said = output_of(command, env=child_environment(HOME=home, HF_HUB_OFFLINE="1"))
        if not saved.is_file():
            raise PeerError(f"llama-benchy left no result: {said[-400:].strip()}")
        return read_benchy(json.loads(saved.read_text(encoding="utf-8")), said)


def read_benchy(raw: Any, said: str = "") -> Benchy:
    try:
        (run,) = raw["benchmarks"]
        return Benchy(float(run["tg_throughput"]["mean"]), float(run["e2e_ttft"]["mean"]))
    except (KeyError, TypeError, ValueError) as e:
        raise PeerError(
            f"llama-benchy has no figure ({type(e).__name__}: {e}); it said: {said[-600:].strip()}"
        ) from None


def _book() -> str:
    """Plain sentences, more than any prompt needs."""
    draw = random.Random("a book")
    return " ".join(draw.choice(OPENINGS) for _ in range(20_000))


def workload(pp: int, tg: int, seed: int) -> Workload:
    """One-turn chats of about as many tokens: the words of the same sentences."""

    def session(k: int) -> Session:
        draw = random.Random(f"second instrument {seed} {k}")
        words = " ".join(draw.choice(OPENINGS) for _ in range(pp)).split()[: max(1, int(0.75 * pp))]
        return Session((Turn(CHAT, {"messages": [{"role": "user", "content": " ".join(words)}]}, tg),))

    return Workload("chat", session)


def compare(
    url: str, tokenizer: Path, pp: int, tg: int, runs: int, rounds: int, cell: Cell, client: HttpClient | None = None
) -> list[Result]:
    client = client or HttpClient(url)
    ours: dict[str, list[float]] = {"speed": [], "ttft": []}
    theirs: dict[str, list[float]] = {"speed": [], "ttft": []}
    for number in range(rounds):
        played = measure_traffic(client, workload(pp, tg, number), ClosedLoop(1, runs), cell)
        if played.refused:
            return [played]
        ours["speed"].append(1e3 / played.figure("tpot_p50").value)
        ours["ttft"].append(played.figure("ttft_p50").value)
        told = run_benchy(url, client.model, tokenizer, pp, tg, runs)
        theirs["speed"].append(told.speed)
        theirs["ttft"].append(told.ttft_ms)
    return results_of(ours, theirs, cell)


def results_of(ours: dict[str, list[float]], theirs: dict[str, list[float]], cell: Cell) -> list[Result]:
    results = []
    for name, unit in (("speed", "tok/s"), ("ttft", "ms")):
        a, b = figure(name, unit, ours[name]), figure("llama_benchy", unit, theirs[name])
        ratio = figure("ratio", "ratio", [x / y for x, y in zip(ours[name], theirs[name])])
        agree = abs(ratio.value - 1) <= WITHIN
        spread = f"{ratio.low:.3f} to {ratio.high:.3f} in {ratio.samples} rounds; what differs: {WHY}"
        target = Check(f"two instruments agree within {WITHIN:.0%}", agree, ratio.value, 1.0, "" if agree else spread)
        each = Cell("second instrument", cell.model, cell.preset, cell.gates, name, cell.shape, cell.engine)
        results.append(Result(each, (a, b, ratio), targets=(target,)))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="without it the embedded model is served")
    parser.add_argument("--tokenizer", type=Path, default=load.EMBEDDED, help="folder or file that llama-benchy reads")
    parser.add_argument("--pp", type=int, default=256)
    parser.add_argument("--tg", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args(argv)
    shape = {"pp": a.pp, "tg": a.tg, "runs": a.runs}
    server = nullcontext(Served(a.url, "")) if a.url else serving("halfbyte", Setup(None), lambda _: None)
    try:
        with server as served:
            cell = Cell("second instrument", "" if a.url else "tiny", shape=shape, engine=served.name)
            results = compare(served.url, a.tokenizer, a.pp, a.tg, a.runs, a.rounds, cell)
    except HalfbyteError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    for result in results:
        print(line_of(result), flush=True)
    client = receipts.sources_of([receipts.PACKAGE / "lab" / "measure" / "traffic.py"], ("lab",))
    return finish("python -m halfbyte.lab.second_instrument", results, receipts.hashes(client), a.out)


if __name__ == "__main__":
    sys.exit(main())
