"""What prefixes in host memory and on disk are worth on a CPU: the first token after a restart and after kill -9, ten
agents whose conversations exceed the pages twice over, and what others notice while pages are moved.

    python -m bench run prefixes
    python -m bench run prefixes --set parts=first-token --set prompt=100000 --set context=131072
    python -m bench run prefixes --set parts=agents,gaps --set rounds=3 --set turns=4

Every case is a process of its own, and rounds take the cases in turn, so that a machine whose load changes is unfair to
none. Seconds of the processor are counted beside those of the clock. Greedy tokens are compared with those of the case
that computes everything; a case with other tokens has no figure. A context beyond the embedded model's is that of a
copy of it with a longer YaRN, whose answers mean nothing, but are as equal as others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measurement import Run, child_command, measurement, option
from halfbyte.errors import UsageError
from halfbyte.gates import child_environment
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure

if TYPE_CHECKING:
    from halfbyte.engine.engine import EngineCore
    from halfbyte.engine.request import SamplingParams

PARTS = ("first-token", "agents", "gaps")
ANSWER = 16  # tokens of each answer
FIRST, TURN = 1500, 150  # tokens of an agent's first prompt, and of what each turn adds
PAGE = 64
PAGE_BYTES = 4 * 2 * 2 * 64 * PAGE * 2  # of the embedded model: layers, keys and values, heads, values of bf16
STREAMS, STREAM_TOKENS = 4, 1400  # that decode while others' prompts come, and tokens of each at most
PROMPTS, ROUND_PROMPTS = 6, 30  # of which the pages hold a part, and how many of them come in a round
CASES: dict[str, dict[str, Any]] = {  # what the pages are helped by
    "pages alone": {"prefix_memory": 0},
    "host memory": {"prefix_memory": 1 << 30},
    "disk": {"prefix_memory": 0, "prefix_folder": ""},
}


@dataclass(frozen=True)
class Options:
    prompt: int = option(7500, "tokens of the prompt that is sent again after a restart")
    context: int = option(0, "the model's context; 0: the embedded model's")
    agents: int = option(10, "conversations at once")
    turns: int = option(5, "turns of each")
    rounds: int = option(3, "rounds of every case with agents and of gaps")
    parts: tuple[str, ...] = option(PARTS, "what is measured")


def greedy() -> SamplingParams:
    from halfbyte.engine.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)


def settings_of(case: str, folder: str) -> dict[str, Any]:
    return CASES[case] | ({"prefix_folder": folder} if "prefix_folder" in CASES[case] else {})


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 2000) for _ in range(count)]


# ---- each in a process of its own -----------------------------------------------------------------------------------


def first_token(model: str | None, folder: str, tokens: int, kill: bool) -> None:
    """Ask one long prompt; print the seconds to its first token, its tokens and its usage. `kill`: then end at once."""
    from halfbyte.engine.python_api import Engine
    from halfbyte.engine.request import Request, Usage

    prompt = random_tokens(random.Random(7), tokens)
    with Engine(model, prefix_folder=folder, device="cpu") as engine:
        engine.generate([prompt[:8]], greedy())
        answer: list[int] = []
        seconds, usage = 0.0, Usage()
        start = time.perf_counter()
        for delta in engine.source.iterate(Request(prompt, greedy())):
            seconds = seconds or time.perf_counter() - start
            answer += delta.tokens
            usage = delta.usage or usage
        result = {"seconds": seconds, "answer": answer, "cached": usage.cached_tokens, "disk": usage.disk_tokens}
        print(json.dumps(result), flush=True)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)


def conversations(case: str, folder: str, agents: int, turns: int) -> None:
    """Agents in rounds, on pages for half of what they hold in the end; prints times, tokens and hits."""
    from halfbyte.engine.python_api import Engine

    rng = random.Random(11)
    shared = random_tokens(rng, 100)
    histories = [shared + random_tokens(rng, FIRST - 100) for _ in range(agents)]
    final = FIRST + turns * (TURN + ANSWER)
    pages = agents * (final // PAGE + 3) // 2 + 1
    gib = pages * PAGE_BYTES / 2**30 + 1e-9
    answers: list[list[int]] = []
    cached = prompt_tokens = 0
    settings = settings_of(case, folder)
    with Engine(device="cpu", kv_gib=gib, max_context=final + 64, max_seqs=agents, **settings) as engine:
        engine.generate([[1, 2, 3]], greedy())
        start, processor = time.perf_counter(), time.process_time()
        for _ in range(turns):
            completions = engine.generate(histories, greedy())
            for i, completion in enumerate(completions):
                cached += completion.usage.cached_tokens
                prompt_tokens += completion.usage.prompt_tokens
                answers.append(completion.tokens)
                histories[i] = histories[i] + completion.tokens + random_tokens(rng, TURN)
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
        stats = engine.stats()
    result = {
        "seconds": seconds, "processor": processor, "answers": answers, "cached": cached,
        "prompt_tokens": prompt_tokens, "pages": stats.kv_pages_total, "preemptions": stats.preemptions,
        "restored": [stats.prefix_memory_tokens, stats.prefix_disk_tokens],
    }  # fmt: skip
    print(json.dumps(result), flush=True)


@dataclass(frozen=True)
class GapLoad:
    """Streams that decode while prompts come one after another."""

    streams: int = STREAMS
    tokens: int = STREAM_TOKENS  # of each stream, at most
    prompt: int = FIRST  # tokens of a prompt
    answer: int = ANSWER
    repeated: int = PROMPTS  # prompts that come `again`, of which the pages hold a part
    prompts: int = ROUND_PROMPTS  # that come in a round


def play_gaps(core: EngineCore, load: GapLoad, again: bool) -> dict[str, Any]:
    """The seconds between two tokens of a stream, by the clock and of the processor, while prompts come: the same few
    `again`, or new ones."""
    from halfbyte.engine.request import Request, SamplingParams

    short = SamplingParams(temperature=0.0, max_tokens=load.answer, ignore_eos=True)
    rng = random.Random(13)
    prompts = [random_tokens(rng, load.prompt) for _ in range(load.repeated)]
    for i, prompt in enumerate(prompts):  # so that the lower tiers have them
        core.submit(Request(prompt, short, id=f"before {i}"))
        while core.has_work:
            core.step()
    long = SamplingParams(temperature=0.0, max_tokens=load.tokens, ignore_eos=True)
    for i in range(load.streams):
        core.submit(Request(random_tokens(rng, 20), long, id=f"stream {i}", client="streams"))
    last: dict[str, tuple[float, float]] = {}
    seconds: list[float] = []
    processor: list[float] = []
    answered = cached = 0
    under_way = False
    while answered < load.prompts and core.has_work:
        if not under_way and len(last) == load.streams:
            prompt = prompts[answered % load.repeated] if again else random_tokens(rng, load.prompt)
            core.submit(Request(prompt, short, id=f"prompt {answered}", client="prompts"))
            under_way = True
        outputs = core.step()
        now = time.perf_counter(), time.process_time()
        for id, delta in outputs:
            if id.startswith("stream"):
                if id in last:
                    seconds.append(now[0] - last[id][0])
                    processor.append(now[1] - last[id][1])
                last[id] = now
            elif delta.finish is not None:
                answered, under_way = answered + 1, False
                cached += delta.usage.cached_tokens if delta.usage is not None else 0
    streams = sum(len(group.seqs) for group in core.groups.values())  # that still decode
    return {"seconds": seconds, "processor": processor, "answered": answered, "cached": cached, "streams": streams}


def gaps(case: str, folder: str, again: bool) -> None:
    """A case on a CPU; prints what `play_gaps` says."""
    from halfbyte.engine.build import build_core
    from halfbyte.engine.options import EngineOptions

    pages = 40 + STREAMS * 28  # for the streams and about four of the six prompts
    gib = pages * PAGE_BYTES / 2**30 + 1e-9
    options = EngineOptions(device="cpu", kv_gib=gib, max_context=FIRST + 64, max_seqs=8, **settings_of(case, folder))
    core, _, _ = build_core(options)
    result = play_gaps(core, GapLoad(), again)
    core.close()
    print(json.dumps(result), flush=True)


def output(function: Any, *arguments: Any) -> dict[str, Any]:
    """The JSON line that the function prints in a process of its own, however that ends."""
    command = child_command(function, *arguments)
    run = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[0])) if lines else {}


# ---- one run --------------------------------------------------------------------------------------------------------


@measurement("prefixes", seconds=1800)
def prefixes(run: Run, options: Options) -> None:
    if unknown := set(options.parts) - set(PARTS):
        raise UsageError(f"there is no part {min(unknown)!r}; use {', '.join(PARTS)}.")
    room = receipts.PACKAGE
    starts = [room / "engine" / "build.py", room / "kv" / "pages.py", *(room / "kernels" / "cpu").glob("*.[ch]*")]
    run.sources |= receipts.hashes(receipts.sources_of(starts, ("engine", "kv")))
    with tempfile.TemporaryDirectory() as folder:
        if "first-token" in options.parts:
            add_first_token(run, options, Path(folder))
        if "agents" in options.parts:
            add_agents(run, options, Path(folder))
        if "gaps" in options.parts:
            add_gaps(run, options, Path(folder))


def add_first_token(run: Run, options: Options, folder: Path) -> None:
    model = long_copy(folder / "model", options.context) if options.context else None
    cold = output(first_token, model, f"{folder}/prefixes", options.prompt, True)  # ends itself by kill -9
    killed = output(first_token, model, f"{folder}/prefixes", options.prompt, False)
    restart = output(first_token, model, f"{folder}/prefixes", options.prompt, False)
    for name, case in (("cold", cold), ("after kill -9", killed), ("after a restart", restart)):
        cell = Cell("first token", "tiny", path=name, shape={"pp": options.prompt})
        same = Check("tokens equal to cold", case["answer"] == cold["answer"])
        ratio = case["seconds"] / cold["seconds"]
        targets = () if case is cold else (Check("at most 0.15 of cold", ratio <= 0.15, ratio, 0.15),)
        figures = (figure("seconds", "s", case["seconds"]), figure("ratio", "ratio", ratio))
        detail = {"cached": case["cached"], "disk": case["disk"], "load": os.getloadavg()[0]}
        run.add(Result(cell, figures if same.ok else (), (same,), targets, detail=detail))


def long_copy(folder: Path, context: int) -> str:
    """A copy of the embedded model whose YaRN reaches further."""
    from halfbyte.model.load import EMBEDDED

    folder.mkdir()
    for path in EMBEDDED.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
    config["rope_scaling"]["factor"] *= context / config["max_position_embeddings"]
    config["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def add_agents(run: Run, options: Options, folder: Path) -> None:
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for number in range(options.rounds):
        for name, done in rounds.items():
            case = output(conversations, name, f"{folder}/{name} {number}", options.agents, options.turns)
            done.append(case | {"load": os.getloadavg()[0]})
    truth = rounds["pages alone"][0]
    for name, done in rounds.items():
        shape = {"concurrency": options.agents, "turns": options.turns, "pages": truth["pages"]}
        cell = Cell("conversations", "tiny", path=name, shape=shape)
        same = Check("tokens equal to pages alone", all(case["answers"] == truth["answers"] for case in done))
        ratios = {
            key: statistics.median(a[key] / b[key] for a, b in zip(rounds["pages alone"], done, strict=True))
            for key in ("seconds", "processor")
        }
        figures = (
            figure("speed", "tok/s", [len(case["answers"]) * ANSWER / case["seconds"] for case in done]),
            figure("hits", "ratio", [case["cached"] / case["prompt_tokens"] for case in done]),
            figure("ratio", "ratio", ratios["seconds"]), figure("ratio_of_processor", "ratio", ratios["processor"]),
        )  # fmt: skip
        targets = tuple(
            Check(f"at least 2 of pages alone ({key})", ratio >= 2, ratio, 2.0)
            for key, ratio in ratios.items() if name != "pages alone"
        )  # fmt: skip
        rest = [{k: case[k] for k in ("seconds", "processor", "restored", "preemptions", "load")} for case in done]
        run.add(Result(cell, figures if same.ok else (), (same,), targets, detail={"rounds": rest}))


def add_gaps(run: Run, options: Options, folder: Path) -> None:
    for again in (True, False):
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
        for number in range(options.rounds):
            for name, done in rounds.items():
                case = output(gaps, name, f"{folder}/gaps {again} {name} {number}", again)
                done.append(case | {"load": os.getloadavg()[0]})
        p99 = {
            (name, clock): [statistics.quantiles(case[clock], n=100)[98] for case in done]
            for name, done in rounds.items()
            for clock in ("seconds", "processor")
        }
        for name, done in rounds.items():
            shape = {"concurrency": STREAMS, "prompts": ROUND_PROMPTS, "again": int(again)}
            cell = Cell("gaps", "tiny", path=name, shape=shape)
            ratios = {
                clock: statistics.median(
                    a / b for a, b in zip(p99[name, clock], p99["pages alone", clock], strict=True)
                )
                for clock in ("seconds", "processor")
            }
            figures = (
                figure("p99_gap", "s", p99[name, "seconds"]),
                figure("p99_gap_of_processor", "s", p99[name, "processor"]),
                figure("p50_gap", "s", [statistics.median(case["seconds"]) for case in done]),
                figure("ratio", "ratio", ratios["seconds"]),
                figure("ratio_of_processor", "ratio", ratios["processor"]),
            )
            targets = tuple(
                Check(f"p99 within 5 % of pages alone ({clock})", ratio <= 1.05, ratio, 1.05)
                for clock, ratio in ratios.items() if name != "pages alone"
            )  # fmt: skip
            detail = {"cached": [case["cached"] for case in done], "load": [case["load"] for case in done]}
            same = Check(
                "every prompt was answered while all streams ran",
                all((case["answered"], case["streams"]) == (ROUND_PROMPTS, STREAMS) for case in done),
            )
            run.add(Result(cell, figures if same.ok else (), (same,), targets, detail=detail))
