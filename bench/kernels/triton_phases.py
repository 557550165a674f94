"""The Triton phases on this GPU at gpt-oss-120b's shapes: every one checked against the reference, then timed.

    python -m bench run triton --set quick=yes --set only=moe

Checks run first, in a few processes at once so that compiling does not take the day; then one process times, inside a
CUDA graph, over more weights than the L2 holds. A phase that is out of its bound has no time. Each time stands beside
its ceiling: measured read bandwidth for few rows, the chip's bf16 rate for many.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.kernels import timing
from bench.kernels.triton_cases import Trial, cases, sweep
from bench.measurement import Run, child_command, last_line, measurement, option
from halfbyte.formats import MXTensor, convert
from halfbyte.kernels.prove import default_spec
from halfbyte.kernels.triton import attention, linear, moe, tiles
from halfbyte.kernels.triton.phases import PHASES
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.ops.attention import STORE_DTYPES
from halfbyte.ops.rope import yarn_frequencies
from halfbyte.plan import reference
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Binding, Phase, Spec
from halfbyte.plan.step import Step

DEVICE = "cuda"
FEATURES = {
    "attention": frozenset({"sinks", "window", "gqa"}), "rope": frozenset({"yarn"}), "qkv": frozenset({"bias"}),
    "o": frozenset({"bias"}), "router": frozenset({"bias"}),
    "moe": frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"}),
}  # fmt: skip


def tuned(case: Trial) -> None:
    """Put the case's tile in place of the chosen one, for this process."""
    t = case.tune
    if case.phase in ("triton.moe", "triton.qkv"):
        tile = tiles.TritonTile(t["bm"], t["bn"], t["bk"], t["warps"], t["stages"]) if t else None
        for module in (linear, moe):
            module.tile_for = (lambda *a: tile) if tile else tiles.tile_for  # type: ignore[assignment]
        linear.linear_call.cache_clear()
        moe.expert_call.cache_clear()
    for name, original in ATTENTION.items():
        change = {k: t[k] for k in ("warps", "stages") if k in t}

        def changed(*a: Any, original: Any = original, change: Any = change) -> Any:
            return replace(original(*a), **change)

        setattr(attention, name, changed)
    attention.prefill_rows = lambda arch: t.get("bm", ROWS(arch))  # type: ignore[assignment]


ROWS = attention.prefill_rows
ATTENTION = {"prefill_call": attention.prefill_call, "decode_call": attention.decode_call}


# Making a case ------------------------------------------------------------------------------------------------------


class BoundCase:
    """One case bound on the GPU, with `copies` of its weights so that no replay finds them in the L2."""

    def __init__(self, case: Trial, copies: int) -> None:
        self.case = case
        tuned(case)
        self.phase: Phase = next(p for p in PHASES if p.name == case.phase)
        base = default_spec(self.phase, **case.spec)
        self.spec = Spec(**{**vars(base), "features": FEATURES})
        g = torch.Generator(DEVICE).manual_seed(zlib.crc32(case.name.encode()))
        self.generator = g
        self.step = self.make_step()
        self.pool = self.make_pool()
        self.weights = [self.make_weights() for _ in range(copies)]
        self.acts = [
            self.make_acts() for _ in range(max(copies, 8) if self.phase.name.startswith("triton.moe") else copies)
        ]

    def randn(self, *shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, device=DEVICE, generator=self.generator) * std + mean).to(dtype)

    def matrix(self, role: str, *shape: int) -> Any:
        kind, k, g = self.spec.formats[role], shape[-1], self.generator
        if kind == "bf16":
            return self.randn(*shape, std=k**-0.5)
        if kind == "q8":
            data = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE, generator=g)
            scales = (torch.rand(*shape[:-1], k // 32, device=DEVICE, generator=g) + 0.5) * k**-0.5 / 73
            return MXTensor(data, scales.half(), shape, "q8")
        data = torch.randint(0, 256, (*shape[:-1], k // 2), dtype=torch.uint8, device=DEVICE, generator=g)
        scales = torch.randint(118, 122, (*shape[:-1], k // 32), dtype=torch.uint8, device=DEVICE, generator=g)
        return convert(MXTensor(data, scales, shape, "mxfp4"), self.phase.layouts(self.spec)[role])

    def make_weights(self) -> SimpleNamespace:
        s, covers = self.spec, self.phase.covers
        q, kv, h, e, i = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.hidden, s.experts, s.intermediate
        w = SimpleNamespace(qkv_bias=self.randn(q + 2 * kv, std=0.1), sinks=self.randn(s.heads, std=1.5, mean=3.0))
        for role in ("attn_norm", "mlp_norm", "final_norm"):
            setattr(w, role, self.randn(h, std=0.1, mean=1.0))
        if "embed" in covers:
            w.embed = self.randn(s.vocab, h)
        if "qkv" in covers:
            w.qkv = self.matrix("qkv", q + 2 * kv, h)
        if "o" in covers:
            w.o, w.o_bias = self.matrix("o", h, q), self.randn(h, std=0.1)
        if "router" in covers:
            w.router, w.router_bias = self.randn(e, h, std=1.5 * h**-0.5), self.randn(e, std=0.05)
        if "moe" in covers:
            w.gate_up, w.gate_up_bias = self.matrix("gate_up", e, 2 * i, h), self.randn(e, 2 * i, std=0.1)
            w.down, w.down_bias = self.matrix("down", e, h, i), self.randn(e, h, std=0.1)
        if "lm_head" in covers:
            w.lm_head = self.matrix("lm_head", s.vocab, h)
        return w

    def make_step(self) -> Step:
        c, s = self.case, self.spec
        new = [c.rows // c.sequences] * c.sequences
        ints = lambda v: torch.tensor(v, dtype=torch.int32, device=DEVICE)  # noqa: E731
        rows = [(n, c.past + i) for n, count in enumerate(new) for i in range(count)]
        starts = [sum(new[:n]) for n in range(c.sequences + 1)]
        blocks = -(-(c.past + new[0]) // s.page_size)
        count = 2 * c.sequences * blocks
        pages = (torch.randperm(count, device=DEVICE).int() + 1).view(2, c.sequences, blocks)
        return Step(
            tokens=torch.randint(0, s.vocab, (len(rows),), dtype=torch.int32, device=DEVICE),
            positions=ints([p for _, p in rows]), query_start=ints(starts), kv_lens=ints([c.past + n for n in new]),
            row_sequence=ints([n for n, _ in rows]), block_tables={"full": pages[0], "sliding": pages[1]},
            logit_rows=ints(list(range(len(rows)))), max_kv_len=c.past + new[0],
        )  # fmt: skip

    def make_pool(self) -> Tensor | None:
        if not {"attention", "kv_write"} & set(self.phase.covers):
            return None
        s = self.spec
        pages = int(self.step.block_tables["full"].numel()) * 2 + 1
        shape = (pages, 4, 2, s.kv_heads, s.page_size, s.head_dim)
        return self.randn(*shape, dtype=torch.float32).to(STORE_DTYPES[s.kv_dtype])

    def make_acts(self) -> Activations:
        s, rows, g = self.spec, self.step.rows, self.generator
        first = self.phase.covers[0]
        q = s.heads * s.head_dim
        f32 = torch.float32
        acts = Activations()
        if first in ("attn_norm", "mlp_norm", "final_norm", "o", "moe"):
            acts.x = self.randn(rows, s.hidden, dtype=f32)
        if first in ("qkv", "moe", "lm_head"):
            acts.h = self.randn(rows, s.hidden, dtype=torch.bfloat16 if s.activation == "bf16" else f32)
        if first == "o":
            acts.attn = self.randn(rows, q)
        if first == "rope":
            heads = [s.heads, s.kv_heads, s.kv_heads]
            acts.q, acts.k, acts.v = torch.split(self.randn(rows, sum(heads), s.head_dim, dtype=f32), heads, 1)
        if first == "attention":
            acts.q = self.randn(rows, s.heads, s.head_dim, std=1.5)
        if first == "moe":
            scores = torch.rand(rows, s.experts, device=DEVICE, generator=g)
            acts.topk_ids = scores.topk(s.top_k).indices.int()
            acts.topk_weights = torch.softmax(self.randn(rows, s.top_k, dtype=f32), 1)
        return acts

    def bind(self, phases: list[Phase], weights: Any, pool: Tensor | None) -> list[Any]:
        rope = yarn_frequencies(self.spec.head_dim, 150000.0, 32.0, 4096, 32.0, 1.0, False)
        return [
            p.bind(Binding(self.spec, weights, self.case.kind, 2, rope, lambda: pool, {}, 0))  # type: ignore[arg-type,return-value]
            for p in phases
        ]

    # ---- correct first --------------------------------------------------------------------------------------------

    def check(self) -> float:
        """Largest relative error over what the phase leaves behind; NaN never passes."""
        mine, expected = self.acts[0].copy(), self.acts[0].copy()
        pools = [None if self.pool is None else self.pool.clone() for _ in range(2)]
        for launch in self.bind([self.phase], self.weights[0], pools[0]):
            launch(self.step, mine)
        oracle = [p for op in self.phase.covers for p in reference.PHASES if p.covers == (op,)]
        for launch in self.bind(oracle, self.weights[0], pools[1]):
            launch(self.step, expected)
        worst = 0.0
        for name in {"embed": ["x"], "rope": ["q"], "qkv": ["q", "k", "v"], "attention": ["attn"], "o": ["x"],
                     "attn_norm": ["h"], "final_norm": ["h"], "mlp_norm": ["h"], "moe": ["x"],
                     "lm_head": ["logits"]}[self.phase.covers[0]]:  # fmt: skip
            a, b = getattr(mine, name).double(), getattr(expected, name).double()
            if self.phase.covers == ("moe",):
                a, b = a - self.acts[0].x.double(), b - self.acts[0].x.double()
            worst = max(worst, float((a - b).norm() / b.norm())) if torch.isfinite(a).all() else math.nan
        if "router" in self.phase.covers:
            same = (mine.topk_ids.long() == expected.topk_ids.long()).all(1)
            assert float(same.float().mean()) > 0.999, "routing differs"
            w = (mine.topk_weights - expected.topk_weights)[same]
            assert float(w.abs().max()) < 1e-3, "routing weights differ"
        if pools[0] is not None and "kv_write" in self.phase.covers:
            assert pools[1] is not None
            written = self.step.rows * 2 * self.spec.kv_heads * self.spec.head_dim
            differ = int((pools[0].float() != pools[1].float()).sum()) / written
            assert differ < 1e-3, f"{differ:.1e} of what was written into the cache differs, or as much elsewhere"
        return worst

    # ---- then time ------------------------------------------------------------------------------------------------

    def time(self, repeats: int) -> list[float]:
        """Microseconds of one launch: replays of a graph that walks over all copies."""
        launches = [self.bind([self.phase], w, self.pool)[0] for w in self.weights]
        count = max(len(launches), len(self.acts), 4)

        def all_copies() -> None:
            for i in range(count):
                launches[i % len(launches)](self.step, self.acts[i % len(self.acts)].copy())

        return timing.graph_us(all_copies, repeats, count)

    def cost(self) -> tuple[float, float]:
        """(bytes of weights and cache read, multiply-adds x 2) of one launch."""
        s, c, rows = self.spec, self.case, self.step.rows
        covers = self.phase.covers
        per_weight = {"bf16": 2.0, "q8": 34 / 32, "mxfp4": 17 / 32}
        q = s.heads * s.head_dim
        if "moe" in covers:
            unique = sum(a.topk_ids.unique().numel() for a in self.acts) / len(self.acts)
            return unique * 3 * s.hidden * s.intermediate * 17 / 32, rows * s.top_k * 6.0 * s.hidden * s.intermediate
        if "attention" in covers:
            lens = [p + 1 for p in self.step.positions.tolist()]
            seen = [min(n, s.window) if c.kind == "sliding" else n for n in lens]
            kv = sum(min(n, s.window + 63) if c.kind == "sliding" else n for n in self.step.kv_lens.tolist())
            return kv * 2 * s.kv_heads * s.head_dim * (1 if s.kv_dtype == "fp8" else 2), sum(seen) * 4.0 * q
        if covers[0] in ("qkv", "o", "lm_head"):
            n, k = {"qkv": (q + 2 * s.kv_heads * s.head_dim, s.hidden), "o": (s.hidden, q),
                    "lm_head": (s.vocab, s.hidden)}[covers[0]]  # fmt: skip
            return n * k * per_weight[s.formats[covers[0]]], 2.0 * rows * n * k
        return 0.0, 0.0


def copies_for(case: Trial) -> int:
    return {"triton.qkv": 6, "triton.o": 6, "triton.lm_head": 1}.get(case.phase, 1)


def check_shard(only: Sequence[str], quick: bool, swept: bool, index: int, count: int) -> list[dict[str, Any]]:
    """The `index`-th of `count` parts of these cases, in a process of its own."""
    timing.begin()
    return list(check_cases(chosen_cases(only, quick, swept)[index::count]))


def check_cases(chosen: list[Trial]) -> Iterator[dict[str, Any]]:
    for case in chosen:
        try:
            error = BoundCase(case, 1).check()
            yield {"name": case.name, "error": error if math.isfinite(error) else None, "ok": error <= case.bound}
        except Exception as e:  # reported in the table, and the run fails
            note = f"{type(e).__name__}: {str(e).strip()[-300:]}"
            yield {"name": case.name, "error": None, "ok": False, "note": note}
        torch.cuda.empty_cache()


def check_all(chosen: list[Trial], filters: tuple[Sequence[str], bool, bool], workers: int) -> dict[str, Check]:
    """Several processes, each with its part of the cases: most of the time is compiling."""
    count = max(1, min(workers, len(chosen)))
    commands = [child_command(check_shard, *filters, i, count) for i in range(count)]
    shards = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    bounds = {case.name: case.bound for case in chosen}
    checks: dict[str, Check] = {}
    for shard in shards:
        out, err = shard.communicate()
        if shard.returncode:  # its cases have no check, and say that their process died
            print(err[-2000:], file=sys.stderr)
            continue
        for row in last_line(out):
            name, note = row["name"], row.get("note", "")
            checks[name] = Check("against the reference", row["ok"], row["error"], bounds[name], note)
    return checks


def measure(cell: Cell, case: Trial, check: Check, repeats: int) -> Result:
    if not check.ok:
        return Result(cell, checks=(check,))
    bench = BoundCase(case, copies_for(case))
    samples = bench.time(repeats)
    read, operations = bench.cost()
    figures = [figure("time", "us", samples)]
    if case.work == "bytes":
        figures.append(figure("read", "TB/s", [read / us / 1e6 for us in samples], timing.read_ceiling()))
    elif case.work == "flops":
        figures.append(figure("rate", "TFLOP/s", [operations / us / 1e6 for us in samples], timing.flop_ceiling()))
    del bench
    torch.cuda.empty_cache()
    return Result(cell, tuple(figures), (check,))


@dataclass(frozen=True)
class Options:
    only: tuple[str, ...] = option((), "cases whose name contains one of these; empty: all")
    quick: bool = option(False, "a few cases")
    sweep: bool = option(False, "other tiles, too")
    workers: int = option(8, "processes that check")
    seconds: float = option(600.0, "no new timing after this")
    repeats: int = timing.REPEATS


def chosen_cases(only: Sequence[str], quick: bool, swept: bool) -> list[Trial]:
    chosen = [c for c in cases() + (sweep() if swept else []) if not only or any(part in c.name for part in only)]
    return [c for c in chosen if c.quick or not quick]


@measurement("triton", needs=("gpu",), seconds=150)
def triton(run: Run, options: Options) -> None:
    timing.begin()
    start = time.monotonic()
    filters = options.only, options.quick, options.sweep
    chosen = chosen_cases(*filters)
    checks = check_all(chosen, filters, options.workers)
    print(f"checked {len(checks)} of {len(chosen)} cases in {time.monotonic() - start:.0f} s", flush=True)
    run.sources |= receipts.measured(PHASES)
    for case in chosen:
        cell = Cell("kernel", "120b", path=case.phase, shape={"case": case.name})
        check = checks.get(case.name, Check("against the reference", False, note="its process died"))
        if check.ok and time.monotonic() - start > options.seconds:
            run.add(Result(cell, checks=(check,), refused=f"not timed: {options.seconds:.0f} s were over"))
            continue
        run.measure(cell, partial(measure, cell, case, check, options.repeats))
