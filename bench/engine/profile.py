"""`halfbyte profile` of several shapes, presets and batches, with one receipt: where a token's time goes on this GPU.

python -m bench run profile --set models=120b --set presets=fast,exact --set batches=1,8,32 --set pp=2048
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.measurement import Run, measurement
from halfbyte import gates as gates_
from halfbyte.lab import receipts, timeline
from halfbyte.lab.profile import Profile, profile_result
from halfbyte.model import load


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("120b",)
    presets: tuple[str, ...] = ("fast", "exact")
    depth: int = 2048
    tokens: int = 16
    batches: tuple[int, ...] = (1, 8, 32)
    pp: tuple[int, ...] = (2048,)


@measurement("profile", needs=("gpu",), seconds=120)
def profile(run: Run, options: Options) -> None:
    for shape in options.models:
        for preset in options.presets:
            name = load.resolve_model(f"random:{shape}")
            model = load.load_model(name, gates_.PRESETS[preset].gates, device="cuda")
            run.sources |= receipts.measured({b.phase for bound in model.plan.bound.values() for b in bound})
            work: list[Callable[[], Profile]] = [
                partial(timeline.decode_profile, model, options.tokens, options.depth, b) for b in options.batches
            ]
            work += [partial(timeline.prefill_profile, model, n) for n in options.pp]
            with torch.inference_mode():
                for take in work:
                    differences = [str(d) for d in model.plan.differences()]
                    run.add(profile_result(take(), shape, preset, model.plan.record.as_dict(), differences))
            del model, work, take
            gc.collect()  # one model's weights must go before the next one's come
            torch.cuda.empty_cache()
