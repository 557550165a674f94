"""What sessions get on a GPU: first tokens from every tier, gaps while pages move, and the cost of --deterministic.

    python -m bench run sessions                                    # 120b, every part, about two minutes on an H200
    python -m bench run sessions --set parts=first-token --set prompts=15000
    python -m bench run sessions --set model= --set device=cpu --set parts=cost    # a trial of the program

One process loads the weights once and binds two plans to them, with --deterministic and without; both want the same
layouts. A restart is an engine that is built anew on these weights, with empty pages and without host memory's copies.

first-token  A prompt that was never sent, the same from host memory, from the disk however fast that is, and as the
             engine chooses between reading and computing. Before it reads the disk, the operating system is made to
             forget the files. Beside them the time in which one thread reads these bytes and does nothing else.
             Tokens and log probabilities must have the bits of the first answer: all of this runs with --deterministic.
gaps         Streams that decode while prompts come, with pages alone, host memory and the disk (as in `prefixes`).
cost         Both plans in turn: decode at several numbers of streams, and a closed loop with its gaps.

What is computed is compared by tests/engine/test_prefixes_on_devices.py and by `python -m bench run schedules`.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bench.engine.mixed_steps import LoopTimes, play_loop
from bench.engine.prefixes import GapLoad, play_gaps, random_tokens
from bench.measurement import Run, engine_sources, measurement, option
from halfbyte import gates as gates_
from halfbyte.engine.build import core_for, tiers_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Logprob, Request, SamplingParams, Usage
from halfbyte.errors import StepError, UsageError
from halfbyte.lab.measure.engine_timing import CoreClient, TimedWork, run_work
from halfbyte.lab.result import Cell, Check, Figure, Result, failed_cell, figure
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss

PARTS = ("first-token", "gaps", "cost")
GIB = 1 << 30
ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
READ_BYTES = 8 << 20  # read from a file at once
FEW_STREAMS = 3  # up to which the plan without --deterministic has a kernel of its own for decoding
DECODE_COST, LOOP_COST, GAP = 0.05, 0.12, 1.05  # what the project wants


@dataclass(frozen=True)
class Options:
    model: str | None = option("random:120b", "empty: the embedded model")
    preset: str = "fast"
    device: str | None = option("cuda", "cpu: a trial of the program, whose figures say nothing about a GPU")
    parts: tuple[str, ...] = option(PARTS, "what is measured")
    prompts: tuple[int, ...] = option((15000, 100000), "tokens of the prompts of first-token")
    folder: Path | None = option(None, "a folder on the disk that is to be read; empty: a temporary one")
    gap_streams: int = option(32, "streams that decode in gaps")
    gap_prompt: int = option(2000, "tokens of the prompts that come in gaps")
    rounds: int = option(2, "rounds of every case of gaps and of cost")
    streams: tuple[int, ...] = option((1, 8, 32, 64), "streams that decode in cost")
    tokens: int = option(128, "tokens of each of them")
    loop_streams: int = option(64, "streams of the closed loop; 0: none")
    loop_prompt: int = 1100
    loop_tokens: int = 128
    loop_turns: int = option(3, "requests of each stream in the closed loop")


class SessionBench:
    """Two cores over the same weights, without lower tiers, and cores with tiers made from them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.name = load.resolve_model(options.model)
        gates = gates_.PRESETS[options.preset].gates
        plain = load.load_model(self.name, gates, device=load.resolve_device(options.device))
        self.context = min(plain.config.max_context, max((*options.prompts, 3072)) + 1024)
        fixed = GptOss(plain.weights, replace(plain.gates, deterministic="on"), page_size=plain.spec.page_size)
        self.models = {"off": plain, "on": fixed}
        self.label = self.name.shape_name
        tokenizer = load.tokenizer_of(self.name)
        self.cores: dict[str, EngineCore] = {}
        for mode, model in self.models.items():
            loop = options.loop_streams * (options.loop_prompt + options.loop_tokens)
            tokens = max(
                loop, *(s * (options.tokens + 256) for s in options.streams), max(options.prompts, default=0) + 16384
            )
            room = (tokens // model.spec.page_size + 6 * 64 + 400) * model.page_bytes / GIB
            engine_options = EngineOptions(
                gates=model.gates, device=model.device.type, max_seqs=64, max_context=self.context, kv_gib=room,
                prefix_memory=0, page_size=model.spec.page_size,
            )  # fmt: skip
            self.cores[mode] = core_for(model, tokenizer, engine_options, self.label)[0]

    @contextmanager
    def core(self, mode: str, memory: int = 0, folder: Path | None = None, pages: int = 0) -> Iterator[EngineCore]:
        """A core with empty pages, all or so many, and these tiers."""
        core = self.cores[mode].anew(replace(self.cores[mode].config, pages=pages or self.cores[mode].config.pages))
        options = EngineOptions(gates=self.models[mode].gates, prefix_folder=None if folder is None else str(folder))
        tiers = tiers_for(self.models[mode], core.runner, options, memory, self.name.label, self.name.path)
        if tiers is not None:
            core.attach(tiers)
        try:
            yield core
        finally:
            if tiers is not None:
                tiers.close()

    def cell(self, kind: str, path: str, mode: str = "off", shape: Mapping[str, Any] = MappingProxyType({})) -> Cell:
        return Cell(kind, self.label, self.options.preset, {"deterministic": mode}, path, dict(shape))

    def close(self) -> None:
        for core in self.cores.values():
            core.close()


# ---- first tokens ----------------------------------------------------------------------------------------------------


@dataclass
class FirstAnswer:
    seconds: float = 0.0  # to the first token
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)


def ask(core: EngineCore, prompt: list[int]) -> FirstAnswer:
    answer = FirstAnswer()
    start = time.perf_counter()
    core.submit(Request(prompt, ANSWER))
    while core.has_work:
        for _, delta in core.step():
            if delta.error is not None:
                raise StepError(delta.error)
            if delta.tokens:
                answer.seconds = answer.seconds or time.perf_counter() - start
                answer.tokens += delta.tokens
                answer.logprobs += delta.logprobs or ()
            answer.usage = delta.usage or answer.usage
    return answer


def forget_files(folder: Path) -> None:
    """Have the operating system read the folder's files from the disk when they are asked for again."""
    os.sync()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_speed(folder: Path) -> float:
    """Bytes a second of one thread that reads the folder's files and does nothing else."""
    forget_files(folder)
    size, start = 0, time.perf_counter()
    buffer = bytearray(READ_BYTES)
    for path in sorted(p for p in folder.rglob("*.prefix") if p.is_file()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    return size / (time.perf_counter() - start)


def measure_first_tokens(run: Run, bench: SessionBench, folder: Path, length: int) -> None:
    model = bench.models["on"]
    rng = random.Random(length)
    vocab = min(model.config.vocab, 150_000)
    most = bench.cores["on"].config.max_rows_per_step
    prompt, first = ([rng.randrange(10, vocab) for _ in range(count)] for count in (length, min(length, most + 100)))
    memory = 2 * length // model.spec.page_size * model.page_bytes
    answers: dict[str, FirstAnswer] = {}
    with bench.core("on", memory, folder) as core:
        ask(core, first)  # so that everything is compiled and allocated
        answers["computed"] = ask(core, prompt)
        settle(core)
        answers["host memory"] = ask(core.anew(), prompt)  # the pages are empty
        settle(core)
    speed = disk_speed(folder)
    for path in ("disk", "as chosen"):
        forget_files(folder)
        with bench.core("on", folder=folder) as core:
            assert core.tiers is not None
            if path == "disk":
                core.tiers.computed = lambda rows, depth, seconds: None  # reads in any case
            else:
                ask(core, random_tokens(rng, min(length, most)))  # a server's warm-up tells it
            answers[path] = ask(core, prompt)
            speeds = core.tiers.speeds
    size = answers["disk"].usage.disk_tokens // model.spec.page_size * model.page_bytes
    cold = answers["computed"]
    for path, answer in answers.items():
        same = Check(
            "tokens and log probabilities have the bits of the computed answer",
            (answer.tokens, answer.logprobs) == (cold.tokens, cold.logprobs),
        )
        tier = {"host memory": answer.usage.memory_tokens, "disk": answer.usage.disk_tokens}.get(path, length)
        reuse = Check("the prefix came from this tier", tier > 0.9 * length, tier, 0.9 * length)
        figures = [
            figure("seconds", "s", answer.seconds), figure("ratio", "ratio", answer.seconds / cold.seconds),
            figure("read_alone", "s", size / speed), figure("disk_read", "GB/s", speed / 1e9),
        ]  # fmt: skip
        best = min(cold.seconds, size / speed)
        chosen = answer.seconds / best
        targets = (Check("at most 1.5 of the faster of reading and computing", chosen <= 1.5, chosen, 1.5),)
        usage = answer.usage
        detail = {
            "cached": usage.cached_tokens, "memory": usage.memory_tokens, "disk": usage.disk_tokens, "bytes": size,
            "speeds": vars(speeds), "load": os.getloadavg()[0],
        }  # fmt: skip
        cell = bench.cell("first token", path, "on", {"pp": length})
        ok = same.ok and reuse.ok
        run.add(
            Result(
                cell, tuple(figures) if ok else (), (same, reuse), targets if path == "as chosen" and ok else (),
                detail=detail,
            )
        )  # fmt: skip


def settle(core: EngineCore) -> None:
    assert core.tiers is not None
    if not core.tiers.settle(120):
        raise StepError("the tiers did not write everything in two minutes.")


# ---- gaps ------------------------------------------------------------------------------------------------------------


def measure_gaps(run: Run, bench: SessionBench, folder: Path, again: bool) -> None:
    """Every case in turn; the first round captures and compiles."""
    options, model = bench.options, bench.models["off"]
    size = model.spec.page_size
    work = GapLoad(
        streams=options.gap_streams, tokens=1024, prompt=options.gap_prompt, answer=4, repeated=6, prompts=18
    )
    prompt_pages = bench.cores["off"].pages.peak_pages(work.prompt + work.answer, 2048)
    pages = 1 + work.streams * (work.tokens // size + 5) + 4 * prompt_pages
    memory = 16 * prompt_pages * model.page_bytes
    tiers = {"pages alone": (0, False), "host memory": (memory, False), "disk": (0, True)}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in tiers}
    p99: dict[str, list[float]] = {name: [] for name in tiers}
    for number in range(options.rounds + 1):
        for name, (most, on_disk) in tiers.items():
            with bench.core("off", most, folder / f"{number}" if on_disk else None, pages) as core:
                seen = play_gaps(core, work, again)
                for id in list(core.groups):
                    core.cancel(id)
                while core.has_work:
                    core.step()
            if number:
                seconds = seen.pop("seconds")
                seen.pop("processor")
                p99[name].append(statistics.quantiles(seconds, n=100)[98])
                rounds[name].append(seen | {"p50": statistics.median(seconds), "longest": max(seconds)})
    for name, done in rounds.items():
        ratio = statistics.median(a / b for a, b in zip(p99[name], p99["pages alone"], strict=True))
        shape = {"concurrency": work.streams, "pp": work.prompt, "prompts": work.prompts, "again": int(again)}
        answered = all((seen["answered"], seen["streams"]) == (work.prompts, work.streams) for seen in done)
        check = Check("every prompt was answered while all streams ran", answered)
        figures = (figure("p99_gap", "ms", [1e3 * s for s in p99[name]]), figure("ratio", "ratio", ratio))
        targets = () if name == "pages alone" else (Check("p99 within 5 % of pages alone", ratio <= GAP, ratio, GAP),)
        cell = bench.cell("gaps", name, shape=shape)
        run.add(Result(cell, figures if check.ok else (), (check,), targets, detail={"rounds": done}))


# ---- what --deterministic costs --------------------------------------------------------------------------------------


def measure_decode(run: Run, bench: SessionBench, streams: int) -> None:
    """Both plans in turn; the first round captures and compiles."""
    options = bench.options
    work = TimedWork(tokens=options.tokens, depth=128, concurrency=streams)
    speeds: dict[str, list[float]] = {mode: [] for mode in bench.cores}
    for number in range(options.rounds + 1):
        for mode in bench.cores:
            with bench.core(mode) as core:
                measured = run_work(CoreClient(core), work, bench.models[mode].config.vocab, 17 * number + streams)
            if number:
                speeds[mode].append(measured.rate)
    ratio = statistics.median(a / b for a, b in zip(speeds["on"], speeds["off"], strict=True))
    target = 1 - DECODE_COST
    for mode, values in speeds.items():
        figures: tuple[Figure, ...] = (figure("speed", "tok/s", values),)
        targets: tuple[Check, ...] = ()
        if mode == "on":
            figures += (figure("of_plain", "ratio", ratio),)
            if streams > FEW_STREAMS:
                targets = (Check("at least 0.95 of the speed without", ratio >= target, ratio, target),)
        cell = bench.cell("decode", "engine", mode, work.shape)
        run.add(Result(cell, figures, (), targets))


def measure_loop(run: Run, bench: SessionBench) -> None:
    options = bench.options
    loops: dict[str, LoopTimes] = {}
    for mode in bench.cores:
        with bench.core(mode) as core:
            play = partial(play_loop, core, core.step, prompt=options.loop_prompt)
            play(min(4, options.loop_streams), 1, tokens=4, seed=2)
            loops[mode] = play(options.loop_streams, options.loop_turns, tokens=options.loop_tokens)
    ratio, target = loops["on"].speed / loops["off"].speed, 1 - LOOP_COST
    for mode, times in loops.items():
        ordered = sorted(times.gaps)
        figures: tuple[Figure, ...] = (
            figure("speed", "tok/s", times.speed), figure("first_token", "ms", [1e3 * s for s in times.firsts]),
            figure("p50_gap", "ms", 1e3 * statistics.median(ordered)),
            figure("p99_gap", "ms", 1e3 * ordered[int(0.99 * len(ordered))]),
        )  # fmt: skip
        targets: tuple[Check, ...] = ()
        if mode == "on":
            figures += (figure("of_plain", "ratio", ratio),)
            targets = (Check("at least 0.88 of the speed without", ratio >= target, ratio, target),)
        shape = {"pp": options.loop_prompt, "tg": options.loop_tokens, "concurrency": options.loop_streams}
        run.add(Result(bench.cell("closed loop", "engine", mode, shape), figures, (), targets))


@measurement("sessions", needs=("gpu",), seconds=300)
def sessions(run: Run, options: Options) -> None:
    if unknown := set(options.parts) - set(PARTS):
        raise UsageError(f"there is no part {min(unknown)!r}; use {', '.join(PARTS)}.")
    torch.set_grad_enabled(False)
    bench = SessionBench(options)
    parts: dict[str, list[tuple[str, Callable[[], None]]]] = {name: [] for name in PARTS}
    with tempfile.TemporaryDirectory(dir=options.folder) as text:
        folder = Path(text)
        for length in options.prompts:
            ask_again = partial(measure_first_tokens, run, bench, folder / f"prompts-{length}", length)
            parts["first-token"].append(("first token", ask_again))
        for again in (True, False):
            parts["gaps"].append(("gaps", partial(measure_gaps, run, bench, folder / f"gaps-{again}", again)))
        for streams in options.streams:
            parts["cost"].append(("decode", partial(measure_decode, run, bench, streams)))
        if options.loop_streams:
            parts["cost"].append(("closed loop", partial(measure_loop, run, bench)))
        for kind, work in (entry for name in options.parts for entry in parts[name]):
            try:
                work()
            except Exception as e:  # one that fails must not cost the others
                run.add(failed_cell(bench.cell(kind, "engine"), e))
    phases = {phase for model in bench.models.values() for phase in model.plan.record.phases()}
    run.sources |= engine_sources(sorted(phases))
    bench.close()
