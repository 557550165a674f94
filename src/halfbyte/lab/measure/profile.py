"""`halfbyte profile` with a receipt: where a token's time goes on this GPU, for true shapes.

    python -m halfbyte.lab.measure.profile --models 120b --presets fast,exact --batches 1,8,32 --pp 2048
    python -m halfbyte.lab.measure.profile --models embedded --device cpu --presets exact --depth 256 --pp 256

Needs no command line packages, so it runs wherever torch and the kernels do. The last line is the receipt.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from halfbyte import gates as gates_
from halfbyte.errors import HalfbyteError
from halfbyte.lab import environment, receipts, timeline
from halfbyte.lab.entry import finish, numbers
from halfbyte.lab.profile import Profile, decide
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model import load


def show(p: Profile, differences: Sequence[str]) -> None:
    print(f"\n{p.what}: {p.step_us:.1f} us, {p.rows * 1e6 / p.step_us:.1f} tokens/s; times: {p.how}")
    for line in p.lines:
        ceiling = "" if line.of_ceiling is None else f"{line.gb_per_s:8.0f} GB/s {line.tflop_per_s:7.1f} TFLOP/s"
        share = "" if line.of_ceiling is None else f"{line.of_ceiling:6.1%} of {line.bound}"
        print(f"  {line.label:16} {line.us:9.1f} us {line.of_step:6.1%} {line.launches:6.1f} x {ceiling} {share}")
    host = ", ".join(f"{k} {v:.1f} us" for k, v in p.host_us_per_token.items())
    print(f"  host per token: {host}; {p.launches:.0f} launches, idle {p.idle_us:.1f} us in {p.gaps:.1f} gaps a step")
    for note in p.notes:
        print(f"  {note}")
    for v in decide(p, differences):
        print(f"  {'->' if v.applies else '  '} {v.sentence}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="120b")
    parser.add_argument("--presets", default="fast")
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batches", type=numbers, default="1")
    parser.add_argument("--pp", type=numbers, default="2048")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device != "cpu":
        environment.need_gpu()
    results: list[Result] = []
    measured: dict[str, str] = {}
    try:
        for shape in args.models.split(","):
            for preset in args.presets.split(","):
                profile_model(results, measured, shape, preset, args)
                gc.collect()  # one model's weights must go before the next one's come
                torch.cuda.empty_cache()
    except HalfbyteError as error:
        print(f"profile: {error}", file=sys.stderr)
        return error.exit_code
    return finish("python -m halfbyte.lab.measure.profile", results, measured, args.out)


def profile_model(
    results: list[Result], measured: dict[str, str], shape: str, preset: str, args: argparse.Namespace
) -> None:
    name = load.resolve_model(None if shape == "embedded" else f"random:{shape}")
    model = load.load_model(name, gates_.PRESETS[preset].gates, device=args.device)
    measured |= receipts.measured({b.phase for bound in model.plan.bound.values() for b in bound})
    work: list[Callable[[], Profile]] = [
        partial(timeline.decode_profile, model, args.tokens, args.depth, b) for b in args.batches
    ]
    work += [partial(timeline.prefill_profile, model, n) for n in args.pp]
    with torch.inference_mode():
        for take in work:
            p = take()
            print(f"{shape} {preset}", end="")
            differences = [str(d) for d in model.plan.differences()]
            show(p, differences)
            cell = Cell(
                "profile",
                name.label.removeprefix("random:"),
                preset,
                path="graph" if p.rows <= 64 else "eager",
                shape={"what": p.what},
            )
            figures = (figure("step", "us", p.step_us), figure("speed", "tok/s", p.rows * 1e6 / p.step_us))
            detail = p.as_dict() | {"decisions": [v.sentence for v in decide(p, differences)]}
            results.append(Result(cell, figures, record=model.plan.record.as_dict(), detail=detail))


if __name__ == "__main__":
    sys.exit(main())
