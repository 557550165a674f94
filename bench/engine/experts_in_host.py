"""A model whose experts are partly in host memory: speeds as `halfbyte bench` has them, and what limits each.

    python -m bench run experts-in-host                      # 120b, 26 of 36 layers' experts
    python -m bench run experts-in-host-all                  # 120b, all experts
    python -m bench run experts-in-host --set model=random:20b --set host=all --set gpu-memory=8GiB

First what the machine gives: host memory read by the threads that multiply, the wire from locked pages, a layer's
experts in CUDA order (copied, and copied and unpacked), one layer's rows on the CPU, and one row's way to the CPU and
back inside a CUDA graph. Then the engine, made as `halfbyte serve` makes it. Nothing is compared here; that is done by
tests/kernels/test_hybrid_gpu.py and by `halfbyte bench`. The receipt is written after every cell, the most wanted
first; no further one begins after `seconds`.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bench.measurement import Run, engine_sources, measurement, option
from halfbyte import gates as gates_
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.placement import placed_gates
from halfbyte.errors import UsageError
from halfbyte.formats import convert
from halfbyte.kernels.cpu import library as native
from halfbyte.kernels.cpu.cores import threads_beside_gpu
from halfbyte.kernels.hybrid import moe
from halfbyte.lab.measure.device_timing import device_us
from halfbyte.lab.measure.engine_timing import TimedWork, cell_of, measure_engine
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.memory import parse_size
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.activations import Activations

ROWS = (1, 2, 4, 8, 16, 64, 256, 512)
MOST_LAYERS = 12  # that rows on the CPU are measured with: more bytes than a cache holds
REPEATS = 5
# The least tokens a second that the project wants: (model, layers in host memory) -> by cell.
TARGETS = {
    ("120b", 26): {"tg32": 45, "pp512": 550, "pp2048": 1900, "pp8192": 6000},
    ("120b", 36): {"tg32": 33, "pp2048": 1400},
}


def host_layers(model: GptOss) -> list[moe.HostLayer]:
    owners = [getattr(b.launch, "__self__", None) for b in model.plan.bound["decode"]]
    return [owner for owner in owners if isinstance(owner, moe.HostLayer)]


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs, device included."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def measure_memories(cell: Cell, layers: list[moe.HostLayer], gates: gates_.Gates) -> Result:
    """What host memory and the wire give, from the experts' own pages."""
    first, state = layers[0], layers[0]._state
    gate_up, down = first._gate_up, first._down
    size = gate_up.data.nbytes + down.data.nbytes
    stream = state.stream(gate_up, down)
    library, threads = state.caller.library, threads_beside_gpu(gates)
    data = gate_up.data
    read = best(lambda: native.read_memory(library, threads, data.data_ptr(), data.nbytes // 8))
    count = stream._count
    piece = data[:count]
    slot = stream._view(0, gate_up, count)
    wire = best(lambda: slot.copy_(piece, non_blocking=True))
    shape = (count, *gate_up.shape[1:])
    unpack = best(lambda: convert(replace(gate_up, data=slot, shape=shape), "plain"))
    turns = iter(range(1000))

    def fill() -> None:
        layer = layers[next(turns) % len(layers)]
        stream.fill(layer._gate_up, layer._down)

    filled = best(fill)
    figures = (
        figure("host_read", "GB/s", data.nbytes / read / 1e9), figure("wire", "GB/s", piece.nbytes / wire / 1e9),
        figure("layer", "ms", 1e3 * filled), figure("layer_wire", "GB/s", size / filled / 1e9),
        figure("unpack", "ms", 1e3 * unpack * size / piece.nbytes),
    )  # fmt: skip
    detail = {"threads": threads.count, "locked": gate_up.data.is_pinned(), "stream_from": state.stream_from}
    print(
        f"  {threads.count} threads, locked pages: {detail['locked']}, rows that stream: {state.stream_from}",
        flush=True,
    )
    return Result(cell, figures, detail=detail)


def measure_rows(cell: Cell, layers: list[moe.HostLayer], rows: int) -> Result:
    """The CPU kernels alone, every layer in turn as a step has them, with routing that no two rows share on purpose."""
    state, spec = layers[0]._state, layers[0]._state.spec
    room, at = state.room(rows), rows * spec.hidden
    g = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(spec.experts, generator=g)[: spec.top_k] for _ in range(rows)]).int()
    touched = int(ids.unique().numel())
    choices = rows * spec.top_k
    room.host_in[:at] = torch.randn(at, generator=g)
    room.host_in[at : at + choices] = ids.flatten().view(torch.float32)
    room.host_in[at + choices : at + 2 * choices] = 1 / spec.top_k
    jobs = [layer._job(rows, room) for layer in layers[:: -(-len(layers) // MOST_LAYERS)]]
    times = []
    for _ in range(3 if rows < 64 else 2):
        began = time.perf_counter()
        for job in jobs:
            state.caller.call(ctypes.byref(job))
        times.append((time.perf_counter() - began) / len(jobs))
    one = layers[0]._gate_up.data[0].nbytes + layers[0]._down.data[0].nbytes
    figures = (
        figure("layer", "ms", [1e3 * t for t in times]),
        figure("read", "GB/s", touched * one / min(times) / 1e9),
    )
    return Result(cell, figures, detail={"experts": touched})


def measure_hand_over(cell: Cell, layers: list[moe.HostLayer]) -> Result:
    """One row through every layer in host memory, in a graph, beside the same calls without a GPU."""
    state, spec = layers[0]._state, layers[0]._state.spec
    device = state.device
    ids = torch.arange(spec.top_k, dtype=torch.int32, device=device)[None]
    shares = torch.full((1, spec.top_k), 1 / spec.top_k, device=device)
    acts = Activations(
        x=torch.zeros((1, spec.hidden), device=device), h=torch.randn((1, spec.hidden), device=device), topk_ids=ids,
        topk_weights=shares,
    )  # fmt: skip

    def work() -> None:
        for layer in layers:
            layer._multiply(1, acts)

    work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    inside = [device_us(graph.replay, 3) / len(layers) for _ in range(REPEATS)]
    jobs = [layer._jobs[1] for layer in layers]
    alone = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for job in jobs:
            state.caller.call(ctypes.byref(job))
        alone.append(1e6 * (time.perf_counter() - began) / len(jobs))
    apart = statistics.median(inside) - statistics.median(alone)
    return Result(cell, (figure("graph", "us", inside), figure("calls", "us", alone), figure("hand_over", "us", apart)))


class Deadline:
    """Cells in the order in which they are wanted; those that would begin too late are refused."""

    def __init__(self, run: Run, seconds: float) -> None:
        self._run, self._seconds, self._began = run, seconds, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def measure(self, cell: Cell, work: Callable[[], Result]) -> None:
        if self.seconds > self._seconds:
            self._run.add(Result(cell, refused=f"not begun: {self._seconds:.0f} s had passed"))
            return
        before = self.seconds
        self._run.measure(cell, work)
        print(f"  {self.seconds - before:.1f} s, {self.seconds:.1f} s in all", flush=True)


@dataclass(frozen=True)
class Options:
    model: str = "random:120b"
    preset: str = "balanced"
    host: str = option("26", "layers whose experts are in host memory: a number, auto or all")
    gpu_memory: str = option("24GiB", "what is used of the GPU")
    reserve: float = option(0.25, "GiB of it that stay free")
    threads: str = option("auto", "threads that multiply; auto: all cores but two")
    prompts: tuple[int, ...] = (2048, 512, 8192)
    tokens: tuple[int, ...] = (32,)
    streams: tuple[int, ...] = (1,)
    repeats: int = 2
    seconds: float = option(130, "after which no further cell is begun")


@measurement("experts-in-host", needs=("gpu", "cores"), seconds=240)
@measurement("experts-in-host-all", needs=("gpu", "cores"), seconds=240, host="all")
def experts_in_host(run: Run, options: Options) -> None:
    torch.set_grad_enabled(False)
    deadline = Deadline(run, options.seconds)
    name, limit = load.resolve_model(options.model), parse_size(options.gpu_memory)
    model, gates = loaded(name, options, deadline)
    layers = host_layers(model)
    if not layers:
        raise UsageError(f"all experts of {name.label} are on the GPU; say with host=N how many layers' are not.")
    changes, shape = {"experts_in_host": str(len(layers))}, {"host_layers": len(layers)}
    cell = Cell("", name.shape_name, options.preset, changes, "engine")
    start = (
        figure("loaded", "s", deadline.seconds),
        figure("locked", "s", getattr(layers[0]._state.link, "locking_s", 0.0)),
        figure("gpu_memory", "GiB", torch.cuda.max_memory_reserved() / 2**30),
    )
    run.add(Result(replace(cell, kind="start", shape=shape), start))
    run.sources |= engine_sources({b.phase.name for bound in model.plan.bound.values() for b in bound})

    def beside(kind: str, measured: Callable[..., Result], **more: int) -> None:
        target = replace(cell, kind=kind, path="hybrid.moe", shape={**shape, **more})
        deadline.measure(target, lambda: measured(target, layers, **more))

    beside("memories", lambda cell, layers: measure_memories(cell, layers, gates))
    beside("hand-over", measure_hand_over)
    beside("rows on the CPU", measure_rows, rows=1)
    works = [TimedWork(tokens=n, concurrency=c) for c in options.streams for n in options.tokens]
    works += [TimedWork(prompt=n) for n in options.prompts]
    targets = TARGETS.get((name.shape_name.removeprefix("random:"), len(layers)), {})
    tokenizer = load.tokenizer_of(name)
    longest = max(work.length for work in works) + 64
    engine = EngineOptions(
        gates=model.gates, gpu_memory=limit, prefix_memory=0, max_context=longest, max_seqs=max(options.streams),
        reserve_gib=options.reserve,
    )  # fmt: skip

    def measure(work: TimedWork) -> Result:
        torch.cuda.empty_cache()  # what the cell before left is no weight
        torch.cuda.reset_peak_memory_stats()
        (result,) = measure_engine(
            model, tokenizer, [work], options.repeats, cell=cell, options=engine,
            progress=lambda text: print(f"  {text}", flush=True),
        )  # fmt: skip
        peak = torch.cuda.max_memory_reserved() / 2**30
        print(f"  {peak:.2f} GiB of the GPU at most", flush=True)
        result = replace(result, detail={**result.detail, "peak_gib": peak})
        least = targets.get(result.cell.label)
        if least is None or not result.figures:
            return result
        value = result.figure("speed").value
        return replace(
            result, targets=(*result.targets, Check(f"at least {least} tokens/s", value >= least, value, least))
        )

    for work in works:
        deadline.measure(cell_of(cell, work), lambda work=work: measure(work))
    for rows in ROWS[1:]:
        beside("rows on the CPU", measure_rows, rows=rows)
    run.sources |= engine_sources(model.plan.record.phases())


def loaded(name: load.ModelName, options: Options, deadline: Deadline) -> tuple[GptOss, gates_.Gates]:
    """The model on the GPU and in host memory. A number of layers is taken as it is: what is free now is not asked,
    because a virtual machine may get its memory as it is used."""
    printed = [0.0]

    def progress(done: int, total: int, tensor: str) -> None:
        if deadline.seconds - printed[0] > 3:
            printed[0] = deadline.seconds
            print(f"  {done / 2**30:.1f} of {total / 2**30:.1f} GiB, {tensor}, {printed[0]:.1f} s", flush=True)

    device = torch.device("cuda")
    flags = {"experts_in_host": options.host, "threads": options.threads}
    with load.OpenCheckpoint(name) as opened:
        gates = gates_.parse(flags, env={}, preset=options.preset)
        if options.host == "auto":
            gates = placed_gates(opened.facts, gates, device, parse_size(options.gpu_memory))
        model = load.load_model(opened, gates, device=device, self_test="off", progress=progress)
    torch.cuda.synchronize()
    return model, gates
