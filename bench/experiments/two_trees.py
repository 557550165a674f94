"""Two checkouts on one GPU, turn by turn: is the one as fast as the other?

    PYTHONPATH=src:. python -m bench.experiments.two_trees --before OTHER_CHECKOUT [--rounds 5] [--out FILE]

Each checkout runs in a process of its own, which loads the weights once and then measures when told to: bare graph
replays and whole prompts, the same tokens in both. They take turns, so that a card that warms up slows both alike. The
last line is the receipt: for every size the speed of both and the median of the ratios, turn by turn. Knows two
names of a few functions, because the older checkout may have been made before they were renamed. Compares no outputs:
each checkout's own checks do that. Both models must fit on the GPU together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.lab import environment

DECODE = ((1, 2048), (8, 128), (32, 128), (64, 128))  # rows, context
PROMPTS = (512, 2048, 8192)


def child(model_name: str, preset: str) -> None:
    """In one checkout: loads, then answers every line with one JSON object of microseconds."""
    import torch

    from halfbyte import gates

    try:
        from halfbyte.lab.measure import device_timing as timing
        from halfbyte.model.load import load_model, resolve_model
    except ImportError:  # before the rooms were folders
        from halfbyte.model.ready import load as load_model
        from halfbyte.model.ready import resolve as resolve_model

        from halfbyte.lab import speed as timing
    capture = getattr(timing, "capture_decode", None) or timing._decoding
    with torch.inference_mode():
        model = load_model(resolve_model(model_name), gates.PRESETS[preset].gates, device="cuda")
        print("ready", flush=True)
        for line in sys.stdin:
            seed = int(line)
            times: dict[str, float] = {}
            for rows, context in DECODE:
                graph, begin = capture(model, timing.fill(model, rows, context + 192), context)
                begin(seed)
                graph.replay()
                times[f"tg128 @ d{context}, c={rows}"] = timing.device_us(graph.replay, 127)
                del graph, begin
            for n in PROMPTS:
                cache = timing.fill(model, 1, n)
                runs = []
                for again in range(3):
                    step = timing.prefill_step(model, cache, timing.random_tokens(model, n, seed + again), 0)
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    int(model.forward(step)[0].argmax())
                    runs.append(time.perf_counter() - start)
                times[f"pp{n}"] = 1e6 * min(runs)
            print(json.dumps(times), flush=True)


def start(checkout: Path, model: str, preset: str) -> subprocess.Popen[str]:
    here = Path(__file__).resolve().parents[2]
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != here / "src"]
    path = os.pathsep.join([str(checkout / "src"), str(here), *others])
    command = [sys.executable, "-m", "bench.experiments.two_trees", "--child", model, preset]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )


def ask(process: subprocess.Popen[str], seed: int) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{seed}\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, default=Path("before"), help="the other checkout")
    parser.add_argument("--model", default="random:120b")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    environment.need_gpu()
    if not (options.before / "src").is_dir():
        raise SystemExit(str(UsageError(f"{options.before} is no checkout of halfbyte; name one with --before.")))
    checkouts = {"before": options.before.resolve(), "after": Path(__file__).resolve().parents[2]}
    processes = {name: start(path, options.model, options.preset) for name, path in checkouts.items()}
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        for process in processes.values():
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready", "a checkout did not load"
        for number in range(options.rounds + 1):
            order = list(processes) if number % 2 else list(processes)[::-1]
            rounds.append({name: ask(processes[name], 10 * number) for name in order})
            print(f"round {number} {json.dumps(rounds[-1])}", flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    rows: dict[str, Any] = {}
    for test in rounds[0]["after"]:
        before, after = ([r[name][test] for r in rounds[1:]] for name in ("before", "after"))
        ratios = sorted(b / a for a, b in zip(after, before))
        rows[test] = {
            "before_us": statistics.median(before), "after_us": statistics.median(after),
            "speed_ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1],
        }  # fmt: skip
        print(f"{test:24} {rows[test]['before_us']:10.1f} us before {rows[test]['after_us']:10.1f} us after, "
              f"speed {rows[test]['speed_ratio']:.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})")  # fmt: skip
    text = json.dumps({"two_trees": rows, "rounds": options.rounds, "model": options.model, "preset": options.preset})
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
