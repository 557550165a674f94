"""Two checkouts, or two models, on one GPU, turn by turn: is the one as fast as the other?

    python -m bench run two-trees --set before=OTHER_CHECKOUT --set rounds=5
    python -m bench run two-trees --set before=. --set model=random:20b --set before-model='random:20b?weights=tame'

Each checkout runs in a process of its own, which loads the weights once and then measures when told to: bare graph
replays and whole prompts, the same tokens in both. They take turns, so that a card that warms up slows both alike. For
every size the receipt has the times of both and the ratios, turn by turn. Compares no outputs: each
checkout's own checks do that. Both models must fit on the GPU together: two of 120b need more than 141 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.experiments import timed_tree
from bench.measurement import ROOT, Run, child_command, measurement, option
from halfbyte.errors import UsageError
from halfbyte.lab.result import Cell, Result, figure


def start(checkout: Path, model: str, preset: str) -> subprocess.Popen[str]:
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT / "src"]
    path = os.pathsep.join([str(checkout / "src"), str(ROOT), *others])
    command = child_command(timed_tree.answer, model, preset)
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )


def ask(process: subprocess.Popen[str], seed: int) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write(f"{seed}\n")
    process.stdin.flush()
    return dict(json.loads(read_line(process)))


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UsageError("a checkout's process ended before it answered; its last lines are above.")
    return line


@dataclass(frozen=True)
class Options:
    before: Path = option(Path("before"), "the other checkout")
    model: str = "random:20b"
    before_model: str = option("", "the model of the other checkout; empty: the same")
    preset: str = "fast"
    rounds: int = 5


@measurement("two-trees", needs=("gpu",), seconds=600, routine=False)
def two_trees(run: Run, options: Options) -> None:
    if not (options.before / "src").is_dir():
        raise UsageError(f"{options.before} is no checkout of halfbyte; name one with --set before=FOLDER.")
    checkouts = {"before": options.before.resolve(), "after": ROOT}
    models = {"before": options.before_model or options.model, "after": options.model}
    processes = {name: start(path, models[name], options.preset) for name, path in checkouts.items()}
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        for process in processes.values():
            assert read_line(process).strip() == "ready", "a checkout did not load"
        for number in range(options.rounds + 1):
            order = list(processes) if number % 2 else list(processes)[::-1]
            rounds.append({name: ask(processes[name], 10 * number) for name in order})
            print(f"round {number} {json.dumps(rounds[-1])}", flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    model = options.model.removeprefix("random:")
    for test in rounds[0]["after"]:
        before, after = ([r[name][test] for r in rounds[1:]] for name in ("before", "after"))
        ratios = [b / a for a, b in zip(after, before)]
        cell = Cell("two trees", model, options.preset, path="after / before", shape={"test": test})
        figures = (figure("before", "us", before), figure("after", "us", after), figure("speed_ratio", "ratio", ratios))
        run.add(Result(cell, figures, detail={"models": models}))
