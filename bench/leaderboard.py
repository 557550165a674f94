"""halfbyte and vLLM over HTTP on one machine, in turn: the same client, the same work, random weights of one shape.

    python -m bench.leaderboard --model random:120b --out FOLDER [--vllm-path DIR] [--vllm-python PYTHON]
    halfbyte report FOLDER

Every contender is a process as its users start it, and ends before the next begins. It plays a closed loop (prompts of
1100 tokens, answers of 256, 1 to 64 streams), then prompt and decode speed behind 2048 tokens, after a round of each
that is not measured: kernels that are compiled when a shape first comes are no part of any figure. vLLM gets random
weights whose routing spreads (`vllm/spread.py`). A figure is INVALID if the kernel that was asked for is not the one
that the engine's record or log names, if an answer has another length, if the server was not warm, or if the card was
throttled. Results are written after every contender; one for which no time is left is refused, not hurried.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.vllm import dummy_model, spread
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.gates import PRESETS, Gates, inherited, parse
from halfbyte.lab import receipts
from halfbyte.lab.entry import line_of, numbers
from halfbyte.lab.levels.benchmark import Measurement
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.engine_timing import Work
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import Limits, PeerProcess
from halfbyte.lab.result import Cell, Result
from halfbyte.lab.served import Traffic, measure_client, measure_workloads
from halfbyte.lab.workloads.arrivals import Arrivals, ClosedLoop
from halfbyte.lab.workloads.workload import synthetic
from halfbyte.model import load

ROOT = Path(__file__).parents[1]
TOOL = "bench/leaderboard.py"
LEAST_S = 45.0  # a contender that has less does not begin
WAVES = {1: 5.0, 8: 3.0}  # sessions for each stream; two are the least for a steady state
MORE = 2.5  # of larger numbers of streams
WARM = 32  # tokens of an answer that is not measured


@dataclass(frozen=True)
class Contender:
    engine: str
    gates: Gates  # that its kernel path is held against
    preset: str = ""
    started: Gates | None = None  # where the engine is asked by flags of its own instead
    flags: tuple[str, ...] = ()


CONTENDERS = {
    "halfbyte-fast": Contender("halfbyte", PRESETS["fast"].gates, "fast"),
    "vllm-triton": Contender("vllm", parse({"moe_kernel": "triton"}, env={}), "", Gates(), ("--moe-backend", "triton")),
    "halfbyte-exact": Contender("halfbyte", PRESETS["exact"].gates, "exact"),
    "vllm-marlin": Contender("vllm", parse({"moe_kernel": "marlin"}, env={})),
    "vllm": Contender("vllm", Gates()),  # what it takes by itself
}


@dataclass(frozen=True)
class Run:
    model: str | None
    device: str | None
    folder: Path
    streams: tuple[int, ...] = (1, 8, 32, 64)
    prompt: int = 1100
    tokens: int = 256
    depth: int = 2048
    decode: int = 128
    repeats: int = 3
    vllm_path: str = ""
    vllm_python: str | None = None
    vllm_flags: tuple[str, ...] = ()

    @property
    def name(self) -> load.ModelName:
        return load.resolve_model(self.model)

    def arrivals(self) -> list[Arrivals]:
        return [ClosedLoop(n, max(2, round(WAVES.get(n, MORE) * n))) for n in self.streams]

    def works(self) -> list[Work]:
        if not self.depth:
            return []
        return [Work(prompt=self.depth, depth=self.depth), Work(tokens=self.decode, depth=self.depth)]


def setup_of(run: Run, contender: Contender) -> Setup:
    gates = contender.gates if contender.started is None else contender.started
    setup = Setup(run.model, gates, run.device, flags=contender.flags)
    if contender.engine != "vllm":
        return setup
    model = dummy_model.write(run.model, run.folder / "model")
    paths = [str(spread.entry_point(run.folder / "plugin")), str(ROOT), str(ROOT / "src"), run.vllm_path]
    paths.append(inherited().get("PYTHONPATH", ""))
    environment = {
        "PYTHONPATH": ":".join(p for p in paths if p), "VLLM_PLUGINS": spread.NAME, "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TIKTOKEN_ENCODINGS_BASE": str(model),
    }  # fmt: skip
    longest = 2 * run.depth + run.prompt + run.tokens + run.decode + 64
    flags = ("--load-format", "dummy", "--max-model-len", str(-(-longest // 1024) * 1024), "--max-num-seqs",
             str(max(run.streams)), "--max-num-batched-tokens", "8192", "--enable-prompt-tokens-details")  # fmt: skip
    return replace(
        setup, file=str(model), flags=(*flags, *contender.flags, *run.vllm_flags), environment=environment,
        python=run.vllm_python,
    )  # fmt: skip


def measure(run: Run, name: str, seconds: float) -> list[Result]:
    """One contender, from its start to its end."""
    contender = CONTENDERS[name]
    peer = engine_named(contender.engine)
    setup = peer.prepare(setup_of(run, contender), say)
    limits = Limits(start_s=seconds, request_s=min(120.0, seconds))
    subject = Subject(peer, replace(setup, gates=contender.gates), run.folder, preset=contender.preset, limits=limits,
                      progress=say)  # fmt: skip
    vocab, deadline = load.config_of(run.name).vocab, time.monotonic() + seconds
    traffic = Traffic("synthetic")

    def play(client: HttpClient, cell: Cell) -> list[Result]:
        results: list[Result] = []
        work = synthetic(run.prompt, run.tokens, vocab, temperature=1.0)
        warm = synthetic(run.prompt, WARM, vocab, seed=1, temperature=1.0)
        for arrival in run.arrivals()[::-1]:
            if time.monotonic() < deadline:
                streams = ClosedLoop(arrival.streams, arrival.streams) if isinstance(arrival, ClosedLoop) else arrival
                measure_workloads(client, traffic, [warm], [streams], cell, lambda text: say(f"warming up: {text}"))
        for arrival in run.arrivals():
            if time.monotonic() > deadline:
                shape = {"workload": work.name, **work.shape, **arrival.shape, "seed": traffic.seed}
                results.append(Result(replace(cell, kind="serving", shape=shape), refused="no time was left for it"))
                continue
            results += measure_workloads(client, traffic, [work], [arrival], cell, say)
        if time.monotonic() < deadline:
            results += measure_client(client, run.works(), run.repeats, cell, vocab, say)
        return results

    engine = PeerProcess(peer, setup, run.folder / name, limits)
    measurement = Measurement(subject, contender.gates, play, engine)
    try:
        measurement.start()
        measurement.time()
    finally:
        measurement.end()
    return [named(r, contender, engine.version) for r in measurement.results()]


def named(result: Result, contender: Contender, version: str) -> Result:
    """With the engine's version, which is known once it runs."""
    if contender.engine == "halfbyte":
        return result
    return replace(result, cell=replace(result.cell, engine=f"{contender.engine} {version}".strip()))


def run_all(run: Run, names: Sequence[str], seconds: float) -> list[Result]:
    """Every contender in turn, within so many seconds; written down after each."""
    results: list[Result] = []
    deadline = time.monotonic() + seconds
    for name in names:
        begun = time.monotonic()
        left = deadline - begun
        cell = Cell("serving", run.name.label.removeprefix("random:"), CONTENDERS[name].preset,
                    CONTENDERS[name].gates.changes(), "http", {"contender": name}, CONTENDERS[name].engine)  # fmt: skip
        if left < LEAST_S:
            found = [Result(cell, refused=f"only {left:.0f} s were left of {seconds:.0f}")]
        else:
            try:
                found = measure(run, name, left)
            except HalfbyteError as e:
                found = [Result(cell, refused=str(e))]
        results += found
        for result in found:
            print(f"{name}: {line_of(result)}", flush=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        served = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("engine",))
        receipts.result_file(TOOL, results, receipts.hashes(served)).write(run.folder / "leaderboard.json")
    return results


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="random:120b, or a folder; without it the embedded model")
    p.add_argument("--device", help="cpu or cuda")
    p.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    p.add_argument("--contenders", default="halfbyte-fast,vllm-triton,halfbyte-exact,vllm-marlin",
                   help=", ".join(CONTENDERS))  # fmt: skip
    p.add_argument("--streams", type=numbers, default=[1, 8, 32, 64])
    p.add_argument("--prompt", type=int, default=1100)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--depth", type=int, default=2048, help="of prompt and decode speed; 0: without them")
    p.add_argument("--decode", type=int, default=128, help="tokens of decode speed")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--seconds", type=float, default=540.0, help="for all contenders together")
    p.add_argument("--vllm-path", default="", help="folder with vLLM, for its process alone")
    p.add_argument("--vllm-python", help="interpreter of vLLM's environment")
    p.add_argument("--vllm-flag", action="append", default=[])
    a = p.parse_args(argv)
    names = [n for n in a.contenders.split(",") if n]
    if unknown := [n for n in names if n not in CONTENDERS]:
        p.error(f"there is no contender {unknown[0]}; there are {', '.join(CONTENDERS)}")
    run = Run(a.model, a.device, a.out.resolve(), tuple(a.streams), a.prompt, a.tokens, a.depth, a.decode, a.repeats,
              a.vllm_path, a.vllm_python, tuple(a.vllm_flag))  # fmt: skip
    try:
        load.resolve_model(run.model)
        results = run_all(run, names, a.seconds)
    except UsageError as e:
        print(f"leaderboard: {e}", file=sys.stderr)
        return e.exit_code
    return 1 if any(r.refused for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
