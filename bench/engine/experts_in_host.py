"""A model whose experts are partly in host memory: speeds as `halfbyte bench` has them, and what limits each.

    python -m bench run experts-in-host                      # 120b, 26 of 36 layers' experts
    python -m bench run experts-in-host-all                  # 120b, all experts
    python -m bench run experts-in-host --set model=random:20b --set host=all --set gpu-memory=8GiB

First what the machine gives: host memory read by the threads that multiply, the wire from locked pages, a layer's
experts in CUDA order (copied, and copied and unpacked), one layer's rows on the CPU, and one row's way to the CPU and
back inside a CUDA graph. Then the engine, made as `halfbyte serve` makes it. Nothing is compared here; that is done by
tests/kernels/test_hybrid_gpu.py and by `halfbyte bench`.
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
from halfbyte.engine.placement import placed_gates
from halfbyte.errors import UsageError
from halfbyte.formats import convert
from halfbyte.kernels.cpu import library as native
from halfbyte.kernels.cpu.cores import threads_beside_gpu
from halfbyte.kernels.hybrid import moe
from halfbyte.lab.measure.device_timing import device_us
from halfbyte.lab.measure.engine_timing import TimedWork, measure_engine
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.memory import parse_size
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.activations import Activations

ROWS = (1, 2, 4, 8, 16, 64, 256, 512)
REPEATS = 5
# The least tokens a second that the project wants: (model, layers in host memory) -> by cell.
WANTED = {
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
    jobs = [layer._job(rows, room) for layer in layers]
    times = []
    for _ in range(3):
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


@dataclass(frozen=True)
class Options:
    model: str = "random:120b"
    preset: str = "balanced"
    host: str = option("26", "layers whose experts are in host memory: a number, auto or all")
    gpu_memory: str = option("24GiB", "what is used of the GPU")
    threads: str = option("auto", "threads that multiply; auto: all cores but two")
    prompts: tuple[int, ...] = (512, 2048, 8192)
    tokens: tuple[int, ...] = (32,)
    streams: tuple[int, ...] = (1,)
    repeats: int = 2


@measurement("experts-in-host", needs=("gpu",), seconds=240)
@measurement("experts-in-host-all", needs=("gpu",), seconds=240, host="all")
def experts_in_host(run: Run, options: Options) -> None:
    torch.set_grad_enabled(False)
    name, device = load.resolve_model(options.model), torch.device("cuda")
    flags = {"experts_in_host": options.host, "threads": options.threads}
    limit = parse_size(options.gpu_memory)
    began = time.perf_counter()
    with load.OpenCheckpoint(name) as opened:
        gates = gates_.parse(flags, env={}, preset=options.preset)
        gates = placed_gates(opened.facts, gates, device, limit)
        model = load.load_model(opened, gates, device=device, self_test="off")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    layers = host_layers(model)
    if not layers:
        raise UsageError(f"all experts of {name.label} are on the GPU; say with host=N how many layers' are not.")
    changes, shape = {"experts_in_host": str(len(layers))}, {"host_layers": len(layers)}
    cell = Cell("", name.shape_name, options.preset, changes, "engine")
    used = torch.cuda.max_memory_reserved() / 2**30
    run.add(
        Result(
            replace(cell, kind="start", shape=shape),
            (figure("loaded", "s", seconds), figure("gpu_memory", "GiB", used)),
        )
    )
    memories = replace(cell, kind="memories", path="hybrid.moe", shape=shape)
    run.measure(memories, lambda: measure_memories(memories, layers, gates))
    for rows in ROWS:
        place = replace(cell, kind="rows on the CPU", path="hybrid.moe", shape={**shape, "rows": rows})
        run.measure(place, lambda place=place, rows=rows: measure_rows(place, layers, rows))
    hand_over = replace(cell, kind="hand-over", path="hybrid.moe", shape=shape)
    run.measure(hand_over, lambda: measure_hand_over(hand_over, layers))
    works = [TimedWork(tokens=n, concurrency=c) for c in options.streams for n in options.tokens]
    works += [TimedWork(prompt=n) for n in options.prompts]
    results = measure_engine(
        model, load.tokenizer_of(name), works, options.repeats, cell=cell, gpu_memory=limit,
        progress=lambda text: print(f"  {text}", flush=True),
    )  # fmt: skip
    wanted = WANTED.get((name.shape_name.removeprefix("random:"), len(layers)), {})
    for result in results:
        least = wanted.get(result.cell.label)
        if least is not None and result.figures:
            value = result.figure("speed").value
            result = replace(
                result, targets=(*result.targets, Check(f"at least {least} tokens/s", value >= least, value, least))
            )
        run.add(result)
    run.sources |= engine_sources(model.plan.record.phases())
