"""halfbyte and vLLM over HTTP on one machine, in turn: the same client, the same work, random weights of one shape.

    python -m bench.leaderboard --model random:120b --out FOLDER [--vllm-path DIR] [--vllm-python PYTHON]
    halfbyte report FOLDER

Every contender is a process as its users start it, and ends before the next begins. It plays a closed loop (prompts of
1100 tokens, answers of 256, 1 to 64 streams), then prompt and decode speed behind 2048 tokens. Before that every number
of streams is played unmeasured until it gets no faster: kernels that are compiled when a shape first comes are no part
of any figure. vLLM gets random weights whose routing spreads (`vllm/spread.py`). A figure is INVALID if the kernel that
was asked for is not the one that the engine's record or log names, if an answer has another length, if the server was
not warm (such a cell is played once more), or if the card was throttled. Results are written after every contender; one
for which no time is left is refused, not hurried. A folder that holds a board already is gone on with: contenders that
are not asked for stay, and a board of another tree, model or machine is refused.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.vllm import dummy_model, spread
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.gates import PRESETS, Gates, inherited, parse
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import line_of, numbers
from halfbyte.lab.levels.benchmark import Measurement
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.targets import targets_for
from halfbyte.lab.measure.engine_timing import Work
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.traffic import WAS_WARM, sessions_of
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import Limits, PeerProcess
from halfbyte.lab.result import Cell, Result, ResultFile, from_json
from halfbyte.lab.served import Traffic, measure_client, measure_workloads
from halfbyte.lab.workloads.arrivals import ClosedLoop
from halfbyte.lab.workloads.workload import synthetic
from halfbyte.model import load

ROOT = Path(__file__).parents[1]
TOOL = "bench/leaderboard.py"
FILE = "leaderboard.json"
SAME = {"sources": "tree", "commit": "tree", "driver": "driver", "cpu": "machine", "system": "machine"}
LEAST_S = 45.0  # a contender that has less does not begin
ROUNDS = 3  # sessions for each stream; whole ones, so that prompts and answers count in the proportion they have
ALONE = 5  # of a single stream
MANY, LATENCY_ROUNDS = 64, 6  # streams from which our own latencies have a target, which asks for so many rounds
WARM = 32  # tokens of an answer that is not measured
WARMER, WARM_MOST = 0.9, 4  # of the time of the play before: one more is worth it; and plays at most


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

    @property
    def model_name(self) -> str:
        return self.name.label.removeprefix("random:")

    def loops(self, engine: str) -> list[ClosedLoop]:
        def rounds(n: int) -> int:
            return ALONE if n == 1 else LATENCY_ROUNDS if n >= MANY and engine == "halfbyte" else ROUNDS

        return [ClosedLoop(n, rounds(n) * n) for n in self.streams]

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


@dataclass
class Player:
    """What is played to a server that runs: first until it is warm, then what counts."""

    run: Run
    engine: str
    deadline: float
    warm_up: dict[int, list[float]] = field(default_factory=dict)  # seconds of every play that is left out

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def __call__(self, client: HttpClient, cell: Cell) -> list[Result]:
        run, traffic, loops = self.run, Traffic("synthetic"), self.run.loops(self.engine)
        vocab = load.config_of(run.name).vocab
        for loop in loops[::-1]:
            self.warm(client, loop.streams, cell, vocab)
        work = synthetic(run.prompt, run.tokens, vocab, temperature=1.0)
        results: list[Result] = []
        seen = 0  # sessions that the server knows
        for loop in loops:
            if self.late:
                shape = {"workload": work.name, **work.shape, **loop.shape, "seed": traffic.seed}
                results.append(Result(replace(cell, kind="serving", shape=shape), refused="no time was left for it"))
                continue
            (result,) = measure_workloads(client, traffic, [work], [loop], cell, say, first=seen)
            seen += sessions_of(loop)
            if was_cold(result) and not self.late:
                say(f"once more: {result.refused}")
                (again,) = measure_workloads(client, traffic, [work], [loop], cell, say, first=seen)
                seen += sessions_of(loop)
                result = replace(again, detail={**again.detail, "played_before": result.refused})
            told = {"rounds": loop.sessions // loop.streams, "warm_up_s": self.warm_up.get(loop.streams, [])}
            results.append(replace(result, detail={**result.detail, **told}))
        if not self.late:
            results += measure_client(client, run.works(), run.repeats, cell, vocab, say)
        return results

    def warm(self, client: HttpClient, streams: int, cell: Cell, vocab: int) -> None:
        """Two rounds, so that prompts come while others answer; again, until that takes no less time than before."""
        seconds = self.warm_up.setdefault(streams, [])
        while len(seconds) < WARM_MOST and not self.late:
            seed = 1 + 100 * streams + len(seconds)  # never a prompt that the server has seen
            work = synthetic(self.run.prompt, WARM, vocab, seed, temperature=1.0)
            begun = time.monotonic()
            measure_workloads(client, Traffic("synthetic"), [work], [ClosedLoop(streams, 2 * streams)], cell,
                              lambda text: say(f"warming up: {text}"))  # fmt: skip
            seconds.append(round(time.monotonic() - begun, 3))
            if len(seconds) > 1 and seconds[-1] > WARMER * seconds[-2]:
                break


def was_cold(result: Result) -> bool:
    return any(c.what == WAS_WARM and not c.ok for c in result.checks)


def measure(run: Run, name: str, seconds: float) -> list[Result]:
    """One contender, from its start to its end."""
    contender = CONTENDERS[name]
    peer = engine_named(contender.engine)
    setup = peer.prepare(setup_of(run, contender), say)
    limits = Limits(start_s=seconds, request_s=min(120.0, seconds))
    subject = Subject(peer, replace(setup, gates=contender.gates), run.folder, preset=contender.preset, limits=limits,
                      progress=say)  # fmt: skip
    play = Player(run, contender.engine, time.monotonic() + seconds)
    engine = PeerProcess(peer, setup, run.folder / name, limits)
    measurement = Measurement(subject, contender.gates, play, engine)
    try:
        measurement.start()
        measurement.time()
    finally:
        measurement.end()
    results = [named(r, contender, engine.version) for r in measurement.results()]
    gpus = environment.gpus()
    targets = targets_for(str(gpus[0]["name"])) if gpus and contender.engine == "halfbyte" else None
    return results if targets is None else targets.judge(results)[0]


def named(result: Result, contender: Contender, version: str) -> Result:
    """With the engine's version, which is known once it runs."""
    if contender.engine == "halfbyte":
        return result
    return replace(result, cell=replace(result.cell, engine=f"{contender.engine} {version}".strip()))


# ---- the board ------------------------------------------------------------------------------------------------------


def board_of(run: Run, results: Sequence[Result], before: ResultFile | None) -> ResultFile:
    """With this machine's record as it is now; the commands that led here, one after the other."""
    served = receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("engine",))
    file = receipts.result_file(TOOL, results, receipts.hashes(served))
    return file if before is None else replace(file, command=(*before.command, "then", *file.command))


def earlier(run: Run) -> ResultFile | None:
    """The board that the folder holds, if it is of this tree, this model and this machine; None where there is none."""
    path = run.folder / FILE
    if not path.is_file():
        return None
    try:
        before = from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, UsageError) as e:
        raise UsageError(f"{path} cannot be gone on with ({e}); name another folder, or remove it.") from None
    now = board_of(run, (), None)
    models = {r.cell.model for r in before.results} - {run.model_name}
    other = ["tree"] if before.measured != now.measured else []
    other += [word for key, word in SAME.items() if before.environment.get(key) != now.environment.get(key)]
    other += ["GPU"] if cards(before) != cards(now) else []
    other += ["model"] if models else []
    other += ["list of contenders"] if any(contender_of(r) not in CONTENDERS for r in before.results) else []
    if other:
        raise UsageError(f"{path} is of another {' and another '.join(dict.fromkeys(other))}; name another folder.")
    return before


def cards(file: ResultFile) -> list[tuple[Any, ...]]:
    """Without what changes from minute to minute."""
    return [(g.get("name"), g.get("capability"), g.get("memory_bytes")) for g in file.environment.get("gpus") or ()]


def contender_of(result: Result) -> str:
    return str(result.detail.get("contender", ""))


def run_all(run: Run, names: Sequence[str], seconds: float, missing: bool = False) -> list[Result]:
    """Every contender in turn, within so many seconds; written down after each. With `missing` those are left as they
    are of which every figure is there."""
    before = earlier(run)
    kept = list(before.results) if before is not None else []
    if missing:
        whole = {contender_of(r) for r in kept} - {contender_of(r) for r in kept if r.refused}
        names = [n for n in names if n not in whole]
    deadline = time.monotonic() + seconds
    for name in names:
        begun, when = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        left = deadline - begun
        cell = Cell("serving", run.model_name, CONTENDERS[name].preset, CONTENDERS[name].gates.changes(), "http",
                    {"contender": name}, CONTENDERS[name].engine)  # fmt: skip
        if left < LEAST_S:
            found = [Result(cell, refused=f"only {left:.0f} s were left of {seconds:.0f}")]
        else:
            try:
                found = measure(run, name, left)
            except HalfbyteError as e:
                found = [Result(cell, refused=str(e))]
        told = {"contender": name, "begun": when, "took_s": round(time.monotonic() - begun, 1)}
        found = [replace(r, detail={**r.detail, **told}) for r in found]
        kept = [r for r in kept if contender_of(r) != name] + found
        kept.sort(key=lambda r: list(CONTENDERS).index(contender_of(r)))
        for result in found:
            print(f"{name}: {line_of(result)}", flush=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        board_of(run, kept, before).write(run.folder / FILE)
    return kept


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="random:120b, or a folder; without it the embedded model")
    p.add_argument("--device", help="cpu or cuda")
    p.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    p.add_argument("--contenders", default="halfbyte-fast,vllm-triton,halfbyte-exact,vllm-marlin",
                   help=", ".join(CONTENDERS))  # fmt: skip
    p.add_argument("--missing", action="store_true", help="leave contenders as they are that the folder has whole")
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
        results = run_all(run, names, a.seconds, a.missing)
    except UsageError as e:
        print(f"leaderboard: {e}", file=sys.stderr)
        return e.exit_code
    return 1 if any(r.refused for r in results if contender_of(r) in names) else 0


if __name__ == "__main__":
    sys.exit(main())
