"""halfbyte and vLLM over HTTP on one machine, in turn: the same client, the same work, random weights of one shape.

    python -m bench run leaderboard --set folder=FOLDER --set vllm_path=DIR --set vllm_python=PYTHON
    halfbyte report FOLDER

Every contender is a process as its users start it, and ends before the next begins. It is asked for its prompt and
decode speed behind 2048 tokens, then plays a closed loop (prompts of 1100 tokens, answers of 256, 1 to 64 streams).
Before that every number of streams is played unmeasured until it gets no faster: kernels that are compiled when a shape
first comes are no part of any figure. vLLM gets random weights whose routing spreads (`vllm/spread.py`). A figure is
INVALID if the kernel that was asked for is not the one that the engine's record or log names, if an answer has another
length, if the server was not warm (such a cell is played up to twice more), or if the card was throttled. Results are
written after every contender, with the seconds of each phase; a contender or a cell for which no time is left is
refused, not hurried. A folder that holds a board already is gone on with: contenders that are not asked for stay, and a
board of another tree, model or machine is refused.

On an H200 with 120b shapes halfbyte took 107 and 114 s, vLLM 0.26 232 s (Marlin) and 338 s (Triton, two cells of which
were played twice). All four need `seconds=840`, or two calls: `seconds=580`, which ends with three of them, then
the same with `missing=yes` and `seconds=300`.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.measurement import ROOT, Column, Row, Run, SideBySide, line_of, measurement, option
from bench.vllm import dummy_model, spread, trace
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.gates import PRESETS, Gates, inherited, parse
from halfbyte.lab import environment, receipts
from halfbyte.lab.levels.benchmark import EngineMeasurement, answer_problem
from halfbyte.lab.levels.scores import OTHER_ENGINE
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.targets import targets_for
from halfbyte.lab.measure.engine_timing import TimedWork, measure_client, random_prompts
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.traffic import WAS_WARM, sessions_of
from halfbyte.lab.options import WorkloadOptions
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess, TimeLimits
from halfbyte.lab.result import Cell, Result, ResultFile, from_json
from halfbyte.lab.served import measure_workloads
from halfbyte.lab.workloads.arrivals import ClosedLoop
from halfbyte.lab.workloads.workload import Workload, synthetic
from halfbyte.model import load

TOOL = "python -m bench"
FILE = "leaderboard.json"
SAME = {"sources": "tree", "commit": "tree", "driver": "driver", "cpu": "machine", "system": "machine"}
LEAST_S = {"halfbyte": 45.0, "vllm": 180.0}  # a contender that has less does not begin
START_MOST_S = 300.0  # one that is not ready by then leaves the rest to the others
END_S = 10.0  # that an engine has to end in
ROUNDS = 3  # sessions for each stream; whole ones, so that prompts and answers count in the proportion they have
ALONE = 5  # of a single stream
MANY, LATENCY_ROUNDS = 64, 6  # streams from which our own latencies have a target, which asks for so many rounds
WARM = 16  # tokens of an answer that is not measured: as many steps as it takes to read the prompts of 64 streams
AGAIN_MOST = 2  # that a cell is played again in which the server was not warm
TRACED, TRACE_S = 32, 40.0  # tokens of a trace; seconds that must be left for it
WARM_ROUNDS = 1.5  # of sessions, so that prompts come while others answer
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
class Leaderboard:
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
    trace: bool = False

    @property
    def name(self) -> load.ModelName:
        return load.resolve_model(self.model)

    @property
    def model_name(self) -> str:
        return self.name.shape_name

    def loops(self, engine: str) -> list[ClosedLoop]:
        def rounds(n: int) -> int:
            return ALONE if n == 1 else LATENCY_ROUNDS if n >= MANY and engine == "halfbyte" else ROUNDS

        return [ClosedLoop(n, rounds(n) * n) for n in self.streams]

    def works(self) -> list[TimedWork]:
        if not self.depth:
            return []
        return [TimedWork(prompt=self.depth, depth=self.depth), TimedWork(tokens=self.decode, depth=self.depth)]


def setup_of(run: Leaderboard, contender: Contender, traces: Path | None = None) -> Setup:
    """`traces`: where vLLM's profiler may write, if it should be there."""
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
    # For gpt-oss vLLM captures graphs of up to 1024 tokens, which took 87 s of its start on an H200. A step that only
    # decodes has a token for each stream, and one that reads a prompt of 1100 has no graph either way: the sizes up to
    # the number of streams are vLLM's own choice of sizes (1, 2, 4 and every multiple of 8), ended there.
    flags += ("--max-cudagraph-capture-size", str(max(run.streams)))
    if traces is not None:
        flags += trace.flags(traces)
    return replace(
        setup, file=str(model), flags=(*flags, *contender.flags, *run.vllm_flags), environment=environment,
        python=run.vllm_python,
    )  # fmt: skip


@dataclass
class ServerRun:
    """What is played to a server that runs: first until it is warm, then what counts."""

    run: Leaderboard
    engine: str
    deadline: float  # of time.monotonic: when the last cell must have ended
    warm_up: dict[int, list[float]] = field(default_factory=dict)  # seconds of every play that is left out
    phases: dict[str, float] = field(default_factory=dict)  # seconds of everything that was done, by name
    last: tuple[int, float] = (0, 0.0)  # sessions of the last closed loop, and the seconds it took
    traces: Path | None = None  # where the engine's profiler writes

    def late(self, sessions: int = 0) -> bool:
        """Whether so many sessions would end too late, if each took as long as those of the last loop. With more
        streams they take less."""
        before, seconds = self.last
        expected = seconds * sessions / before if before else 0.0
        return time.monotonic() + expected > self.deadline

    def __call__(self, engine: PeerProcess, cell: Cell) -> list[Result]:
        run, loops = self.run, self.run.loops(self.engine)
        client = HttpClient(engine.url, tokenizer=load.tokenizer_of(run.name))
        vocab = load.config_of(run.name).vocab
        for loop in loops[::-1]:
            self.warm(client, loop.streams, cell, vocab)
        begun = time.monotonic()
        own = partial(answer_problem, engine.asker, 2 * OTHER_ENGINE)
        results = measure_client(client, run.works(), run.repeats, cell, vocab, say, judge=own) if run.works() else []
        if results:
            self.phases["depth"] = round(time.monotonic() - begun, 3)
        work = synthetic(run.prompt, run.tokens, vocab, temperature=1.0)
        seen = 0  # sessions that the server knows
        for loop in loops:
            if self.late(loop.sessions):
                results.append(refused_cell(cell, work, loop))
                continue
            result = self.play(client, work, loop, cell, seen)
            seen += sessions_of(loop)
            cold: list[str] = []
            while was_cold(result) and len(cold) < AGAIN_MOST and not self.late(loop.sessions):
                say(f"once more: {result.refused}")
                cold.append(result.refused)
                result = self.play(client, work, loop, cell, seen)
                seen += sessions_of(loop)
            if cold:
                result = replace(result, detail={**result.detail, "played_before": cold})
            detail = {"rounds": loop.sessions // loop.streams, "warm_up_s": self.warm_up.get(loop.streams, [])}
            results.append(replace(result, detail={**result.detail, **detail}))
        if self.traces is not None and time.monotonic() + TRACE_S < self.deadline:
            results.append(self.traced(client, cell, vocab, self.traces))
        return results

    def traced(self, client: HttpClient, cell: Cell, vocab: int, folder: Path) -> Result:
        """Where the time of one stream's tokens goes, behind a prompt that the cache holds. After all that is timed."""
        begun = time.monotonic()
        cell = replace(cell, kind=trace.KIND, path="trace", shape=TimedWork(tokens=TRACED, depth=self.run.depth).shape)
        (prompt,) = random_prompts(vocab, 1, max(1, self.run.depth), 7)
        try:
            client.complete([prompt], 1)
            trace.record(client.base, lambda: client.complete([prompt], TRACED), TRACE_S)
            return trace.result_of(folder, cell, TRACED)
        except HalfbyteError as e:
            return Result(cell, refused=str(e))
        finally:
            self.phases["trace"] = round(time.monotonic() - begun, 3)

    def play(self, client: HttpClient, work: Workload, loop: ClosedLoop, cell: Cell, seen: int) -> Result:
        begun = time.monotonic()
        (result,) = measure_workloads(client, WorkloadOptions("synthetic"), [work], [loop], cell, say, first=seen)
        took = time.monotonic() - begun
        self.last = loop.sessions, took
        name = f"c={loop.streams}"
        self.phases[name] = round(self.phases.get(name, 0.0) + took, 3)
        return result

    def warm(self, client: HttpClient, streams: int, cell: Cell, vocab: int) -> None:
        """Again, until that takes no less time than before."""
        seconds = self.warm_up.setdefault(streams, [])
        loop = ClosedLoop(streams, max(2, int(WARM_ROUNDS * streams)))
        while len(seconds) < WARM_MOST and not self.late():
            seed = 1 + 100 * streams + len(seconds)  # never a prompt that the server has seen
            work = synthetic(self.run.prompt, WARM, vocab, seed, temperature=1.0)
            begun = time.monotonic()
            measure_workloads(client, WorkloadOptions("synthetic"), [work], [loop], cell,
                              lambda text: say(f"warming up: {text}"))  # fmt: skip
            seconds.append(round(time.monotonic() - begun, 3))
            if len(seconds) > 1 and seconds[-1] > WARMER * seconds[-2]:
                break
        self.phases[f"warm-up c={streams}"] = round(sum(seconds), 3)


def refused_cell(cell: Cell, work: Workload, loop: ClosedLoop) -> Result:
    shape = {"workload": work.name, **work.shape, **loop.shape}
    return Result(replace(cell, kind="serving", shape=shape), refused="no time was left for it")


def was_cold(result: Result) -> bool:
    return any(c.what == WAS_WARM and not c.ok for c in result.checks)


def measure(run: Leaderboard, name: str, seconds: float) -> list[Result]:
    """One contender, from its start to its end."""
    contender = CONTENDERS[name]
    begun = time.monotonic()
    peer = engine_named(contender.engine)
    traces = run.folder / name / "trace" if run.trace and contender.engine == "vllm" else None
    setup = peer.prepare(setup_of(run, contender, traces), say)
    limits = TimeLimits(start_s=min(START_MOST_S, seconds), request_s=min(120.0, seconds))
    subject = Subject(peer, replace(setup, gates=contender.gates), run.folder, preset=contender.preset, limits=limits,
                      progress=say)  # fmt: skip
    play = ServerRun(run, contender.engine, begun + seconds - END_S, traces=traces)
    engine = PeerProcess(peer, setup, run.folder / name, limits)
    measurement = EngineMeasurement(subject, contender.gates, play, engine)
    try:
        measurement.start()
        play.phases["start"] = round(time.monotonic() - begun, 3)  # preparations and first requests included
        measurement.time()
    finally:
        ending = time.monotonic()
        measurement.end()
        play.phases["end"] = round(time.monotonic() - ending, 3)
    say(f"{name}: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in play.phases.items()))
    detail = {"phases_s": play.phases}
    results = [named(replace(r, detail=r.detail | detail), contender, engine.version) for r in measurement.results()]
    gpus = environment.gpus()
    targets = targets_for(str(gpus[0]["name"])) if gpus and contender.engine == "halfbyte" else None
    return results if targets is None else targets.judge(results)[0]


def named(result: Result, contender: Contender, version: str) -> Result:
    """With the engine's version, which is known once it runs."""
    if contender.engine == "halfbyte":
        return result
    return replace(result, cell=replace(result.cell, engine=f"{contender.engine} {version}".strip()))


# ---- the board ------------------------------------------------------------------------------------------------------


def board_of(run: Leaderboard, results: Sequence[Result], before: ResultFile | None) -> ResultFile:
    """With this machine's record as it is now; the commands that led here, one after the other."""
    gate_sets = [c.gates for c in CONTENDERS.values() if c.engine == "halfbyte"]
    file = receipts.result_file(TOOL, results, receipts.served(run.model, gate_sets, run.device))
    return file if before is None else replace(file, command=(*before.command, "then", *file.command))


def earlier(run: Leaderboard) -> ResultFile | None:
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


def figures_of(results: Sequence[Result]) -> int:
    return sum(not r.refused for r in results)


def run_all(run: Leaderboard, names: Sequence[str], seconds: float, missing: bool = False) -> list[Result]:
    """Every contender in turn, within so many seconds; written down after each. With `missing` those are left as they
    are of which every figure is there, those come last of which there is any, and less than there was counts for
    nothing."""
    before = earlier(run)
    stored = list(before.results) if before is not None else []
    if missing:
        some = {contender_of(r) for r in stored if not r.refused}
        complete = some - {contender_of(r) for r in stored if r.refused}
        names = sorted((n for n in names if n not in complete), key=lambda n: n in some)
    deadline = time.monotonic() + seconds
    for name in names:
        begun, when = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        left = deadline - begun
        cell = Cell("serving", run.model_name, CONTENDERS[name].preset, CONTENDERS[name].gates.changes(), "http",
                    {"contender": name}, CONTENDERS[name].engine)  # fmt: skip
        if left < LEAST_S[CONTENDERS[name].engine]:
            results = [Result(cell, refused=f"only {left:.0f} s were left of {seconds:.0f}")]
        else:
            try:
                results = measure(run, name, left)
            except HalfbyteError as e:
                results = [Result(cell, refused=str(e))]
        detail = {"contender": name, "begun": when, "took_s": round(time.monotonic() - begun, 1)}
        results = [replace(r, detail={**r.detail, **detail}) for r in results]
        had = [r for r in stored if contender_of(r) == name]
        if missing and figures_of(had) > figures_of(results):
            results = had
        stored = [r for r in stored if contender_of(r) != name] + results
        stored.sort(key=lambda r: list(CONTENDERS).index(contender_of(r)))
        for result in results:
            print(f"{name}: {line_of(result)}", flush=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        board_of(run, stored, before).write(run.folder / FILE)
    return stored


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Options:
    model: str | None = option("random:120b", "a shape or a folder; empty: the embedded model")
    device: str | None = option(None, "cpu or cuda")
    folder: Path = option(ROOT / "build" / "leaderboard", "results and logs")
    contenders: tuple[str, ...] = option(
        ("halfbyte-fast", "vllm-triton", "halfbyte-exact", "vllm-marlin"), ", ".join(CONTENDERS)
    )
    missing: bool = option(False, "leave contenders as they are that the folder has whole")
    streams: tuple[int, ...] = (1, 8, 32, 64)
    prompt: int = 1100
    tokens: int = 256
    depth: int = option(2048, "of prompt and decode speed; 0: without them")
    decode: int = option(128, "tokens of decode speed")
    repeats: int = 3
    seconds: float = option(540.0, "for all contenders together")
    vllm_path: str = option("", "folder with vLLM, for its process alone")
    vllm_python: str | None = option(None, "interpreter of vLLM's environment")
    vllm_flags: tuple[str, ...] = ()
    trace: bool = option(False, "also a trace of vLLM's kernels, after all that is timed")

    def __post_init__(self) -> None:
        if unknown := [n for n in self.contenders if n not in CONTENDERS]:
            raise UsageError(f"there is no contender {unknown[0]!r}; there are {', '.join(CONTENDERS)}.")


def _row(label: str, figure: str, over: str, values: tuple[Any, ...], kind: str = "serving", **shape: Any) -> Row:
    return Row(label, kind, figure, "http", "120b", shape=shape, over=over, values=values)


@measurement(
    "leaderboard", seconds=900, receipt=False, routine=False,
    side_by_side=(
        SideBySide(
            "leaderboard",
            (
                Column("halfbyte `fast`", preset="fast"),
                Column("`exact`", preset="exact"),
                Column("vLLM, Triton's experts", "vllm", moe_kernel="triton"),
                Column("Marlin's", "vllm", moe_kernel="marlin"),
            ),
            (
                _row("tokens/s at 1 / 8 / 32 / 64 streams", "speed", "concurrency", (1, 8, 32, 64), pp=1100, tg=256),
                _row("first token at 64 streams, p50, ms", "ttft_p50", "concurrency", (64,), pp=1100, tg=256),
                _row("the same, p99", "ttft_p99", "concurrency", (64,), pp=1100, tg=256),
                _row("gap between tokens at 64 streams, p99, ms", "itl_p99", "concurrency", (64,), pp=1100, tg=256),
                _row("decode @ 2k", "speed", "concurrency", (1,), "decode", tg=128, depth=2048),
                _row("pp2048 @ 2k", "speed", "concurrency", (1,), "prompt", pp=2048, depth=2048),
            ),
            ceilings=True,
        ),
    ),
)  # fmt: skip
def leaderboard(run: Run, options: Options) -> None:
    names = list(options.contenders)
    board = Leaderboard(
        options.model, options.device, options.folder.resolve(), options.streams, options.prompt, options.tokens,
        options.depth, options.decode, options.repeats, options.vllm_path, options.vllm_python, options.vllm_flags,
        options.trace,
    )  # fmt: skip
    load.resolve_model(board.model)
    results = run_all(board, names, options.seconds, options.missing)
    run.status = int(any(r.refused for r in results if contender_of(r) in names))
