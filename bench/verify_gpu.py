"""What a step that verifies drafts costs on a GPU, replayed as a graph and queued eagerly.

    python bench/verify_gpu.py --model random:20b --batches 1,8 --draft 3

Every sequence gets a draft of random tokens every time, all of them rejected (so that a step adds one token to each,
and both ways run the same steps); the tokens must be those of eager steps, or the first that is not is named, with the
rows of every step. Drafting costs nothing here: what is timed
is schedule, verify and commit, whose result decides the next step, so the host's time shows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from halfbyte import gates as gates_  # noqa: E402
from halfbyte.engine.batch import Batch  # noqa: E402
from halfbyte.engine.build import core_for  # noqa: E402
from halfbyte.engine.options import EngineOptions  # noqa: E402
from halfbyte.engine.request import Request, SamplingParams  # noqa: E402
from halfbyte.engine.runner import StepHandle  # noqa: E402
from halfbyte.engine.sequence import Sequence  # noqa: E402
from halfbyte.engine.speculative.controller import Controller, Pace  # noqa: E402
from halfbyte.engine.speculative.proposer import Proposal  # noqa: E402
from halfbyte.lab import environment, receipts  # noqa: E402
from halfbyte.model import load  # noqa: E402
from halfbyte.model.gpt_oss import GptOss  # noqa: E402


class Always(Pace):
    """A draft every time, whatever became of the last."""

    def length(self, batch: int, rows: int, context: int) -> int:
        return self._controller.longest

    def learned(self, drafted: int, accepted: int) -> None: ...


class Noise:
    """Drafts of random tokens, the same in every run."""

    def __init__(self, vocab: int, length: int) -> None:
        self._random, self._vocab = random.Random(1), vocab
        self._controller = Controller(lambda rows, context: 1.0, longest=length)

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        return [Proposal([self._random.randrange(self._vocab) for _ in range(most)]) for _, most in wants]

    def observe(self, seq: Sequence, new: int) -> None: ...
    def forget(self, seq: Sequence) -> None: ...
    def pace(self, seq: Sequence) -> Pace:
        return Always(self._controller)


def measure(model: GptOss, gates: gates_.Gates, batch: int, args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    name = load.resolve_model(args.model)
    context = args.depth + args.count + 64
    options = EngineOptions(gates=gates, max_seqs=batch, max_context=context, kv_gib=2.0, max_draft=args.draft)
    core, _, _ = core_for(model, load.tokenizer_of(name), options)
    if args.draft:
        core.proposer = Noise(model.config.vocab, args.draft)
    g = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0.0, max_tokens=args.count, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(torch.randint(0, model.config.vocab, (batch, args.depth), generator=g).tolist()):
        core.submit(Request(prompt, params, id=f"q{i}"))
        tokens[f"q{i}"] = []
    times = []
    launch, sizes = core.runner.launch, Counter[int]()

    def counted(batch: Batch) -> StepHandle:
        sizes[batch.rows] += 1
        return launch(batch)

    core.runner.launch = counted  # type: ignore[method-assign]
    while core.has_work:
        start = time.perf_counter()
        for id, delta in core.step():
            if delta.finish == "error":
                raise SystemExit(f"a request failed: {delta.error}")
            tokens[id] += delta.tokens
        times.append(time.perf_counter() - start)
    stats = core.stats()
    core.close()
    model.release_kv()
    torch.cuda.empty_cache()
    middle = times[len(times) // 3 : -4]
    row = {
        "batch": batch, "rows": batch * (args.draft + 1), "graphs": gates.graphs, "steps": len(middle),
        "median_us": statistics.median(middle) * 1e6, "p90_us": sorted(middle)[int(0.9 * len(middle))] * 1e6,
        "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens, "steps_of_rows": dict(sizes),
    }  # fmt: skip
    return row, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:20b")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8])
    parser.add_argument("--draft", type=int, default=3)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    model = load.load_model(load.resolve_model(args.model), gates_.PRESETS[args.preset].gates, device=args.device)
    mine = [receipts.PACKAGE / "engine" / "runner.py", receipts.PACKAGE / "plan" / "draw.py"]
    result: dict[str, Any] = {
        "bench": "verify", "schema": 1, "environment": environment.collect(), "model": args.model,
        "preset": args.preset, "depth": args.depth, "draft": args.draft, "rows": [],
        "measured": receipts.hashes(receipts.sources_of(mine, ("kernels", "engine"))),
    }  # fmt: skip
    equal = True
    for batch in args.batches:
        said = []
        for graphs in ("on", "off"):
            gates = gates_.parse({"graphs": graphs}, env={}, preset=args.preset)
            row, tokens = measure(model, gates, batch, args)
            said.append(tokens)
            result["rows"].append(row)
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        other = {
            id: next(i for i, (a, b) in enumerate(zip(mine, said[1][id], strict=True)) if a != b)
            for id, mine in said[0].items()
            if mine != said[1][id]
        }
        result["rows"][-2] |= {"tokens_equal_eager": not other, "first_other_token": other}
        equal = equal and not other
        print(
            f"batch {batch}: graphs and eager give equal tokens: {f'no, from {other} on' if other else 'yes'}",
            flush=True,
        )
        result["measured"] |= receipts.measured(model.plan.record.phases())
        if args.out:
            args.out.write_text(json.dumps(result, default=str), encoding="utf-8")
    print(json.dumps(result, default=str))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
