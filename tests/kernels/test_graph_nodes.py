"""Kernels on record, eagerly and in captured graphs: over a driver that runs nothing, and on a GPU over a real one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from halfbyte.engine.graphs import DecodeGraph
from halfbyte.kernels import graph_nodes, launch
from halfbyte.kernels.launch import Kernel, Program, declared_kernels, module_hash
from halfbyte.lab import timeline
from halfbyte.model import synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan import reference
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, OPERATIONS, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared, NodeKernel
from halfbyte.plan.select import PlanChoice
from halfbyte.plan.step import Step
from halfbyte.roofline import GPUS, Work
from tests.kernels.fake_driver import CHILD, COPY, HOST, KERNEL, Argument, FakeDriver, install
from tests.reference import REFERENCE

SMALL = NAMED["small"]
RIGHT, WRONG = b"the cubin that was compiled", b"another build of it"
PROGRAM = Program(Path("experts.cu"), "experts", ("-DHB_ROWS=1",))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    for name in ("loaded_modules", "loaded_functions"):
        monkeypatch.setattr(launch, name, {})
        monkeypatch.setattr(graph_nodes, name, getattr(launch, name))
    monkeypatch.setattr(launch, "_compiled", {(PROGRAM, "sm_90a"): module_hash(RIGHT)})
    fake = install(monkeypatch)
    monkeypatch.setattr(graph_nodes, "_driver", lambda: fake)
    return fake


class KernelMoe(reference.Moe):
    """The reference's experts behind a kernel's launch."""

    name, reference = "test.kernel_moe", False
    cubin = RIGHT

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return declared_kernels([PROGRAM], ARCHES["sm90"])

    def bind(self, b: Binding) -> Launch:
        run, kernel = self.operation(b), Kernel(self.cubin, "experts", 0)

        def launch(step: Step, acts: Activations) -> None:
            kernel.launch(1, 32, Argument(), early=True, cooperative=True)
            run(step, acts)

        return launch


class PlantedMoe(KernelMoe):
    cubin = WRONG


def model_with(moe: Phase) -> GptOss:
    plain = GptOss(synthetic.make(SMALL, seed=0), REFERENCE)
    chosen = {r: [moe if p.covers == ("moe",) else p for p in ps] for r, ps in _chosen(plain).items()}
    names = {r: tuple(p.name for p in ps) for r, ps in chosen.items()}
    return GptOss(
        plain.weights, REFERENCE, choice=PlanChoice(plain.spec, chosen, replace(plain.plan.selection, chosen=names))
    )  # type: ignore[arg-type]


def _chosen(model: GptOss) -> dict[str, list[Phase]]:
    return {regime: list(dict.fromkeys(b.phase for b in bound)) for regime, bound in model.plan.bound.items()}


@pytest.mark.parametrize("moe", [KernelMoe, PlantedMoe])
def test_an_eager_step(driver: FakeDriver, moe: type[KernelMoe]) -> None:
    model = model_with(moe())
    SingleSequence(model, 64).feed([5])
    assert len(driver.launches) == SMALL.layers
    assert model.plan.record.launches("decode")[NodeKernel("experts", module_hash(moe.cubin))] == SMALL.layers
    said = [str(d) for d in model.plan.differences()]
    if moe is KernelMoe:
        assert said == []
    else:
        (text,) = said
        assert text == (
            f"test.kernel_moe (decode): launched another build of experts ({module_hash(WRONG)}; "
            f"declared: {module_hash(RIGHT)})"
        )


@pytest.mark.parametrize("moe", [KernelMoe, PlantedMoe])
def test_a_captured_step(driver: FakeDriver, moe: type[KernelMoe]) -> None:
    model = model_with(moe())
    model.allocate_kv(8)
    graph = DecodeGraph(model, 2, 4, feed_back=True)
    graph.capture()
    r = model.plan.record
    node = NodeKernel("experts", module_hash(moe.cubin))
    warm = 2 * SMALL.layers  # two steps that warm up
    assert r.launches()[node] == len(driver.launches) == warm
    for _ in range(5):
        graph.replay()
    assert len(driver.launches) == warm, "a replay launches nothing by itself"
    assert r.launches()[node] == warm + 5 * SMALL.layers
    (captured,) = r.graphs
    assert captured.nodes == {node: SMALL.layers}
    assert (captured.replays, captured.regime, captured.rows) == (5, "decode", 2)
    said = [str(d) for d in model.plan.differences()]
    assert (said == []) == (moe is KernelMoe)
    assert all("another build of experts" in text for text in said)


def test_a_node_that_was_exchanged_is_named(driver: FakeDriver) -> None:
    """What the driver holds counts, whatever was launched while it was captured."""
    model = model_with(KernelMoe())
    model.allocate_kv(8)
    wrong = Kernel(WRONG, "experts", 0)
    graph = DecodeGraph(model, 1, 4)
    graph.capture()
    assert graph.graph is not None
    driver.graphs[graph.graph.raw_cuda_graph()][0] = (KERNEL, wrong._function)
    graph.captured.read(graph.graph.raw_cuda_graph())
    graph.replay()
    said = [str(d) for d in model.plan.differences()]
    assert any(module_hash(WRONG) in text and "stands 1 times, launched 0 times" in text for text in said), said


def test_nodes_of_every_kind(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launch.host_functions, 4711, NodeKernel("hb_run_expert_job", "of the library"))
    ours = Kernel(RIGHT, "experts", 0)
    copy = driver.foreign("vectorized_copy")
    driver.libraries[7] = driver.foreign("of a library")
    driver.graphs[1] = [(KERNEL, ours._function), (COPY, 0), (CHILD, 2), (KERNEL, 7), (HOST, 4711), (HOST, 12)]
    driver.graphs[2] = [(KERNEL, copy)]
    assert graph_nodes.kernels(1) == [
        ("experts", module_hash(RIGHT)), ("vectorized_copy", ""), ("of a library", ""),
        ("hb_run_expert_job", "of the library"), ("host function at 0xc", ""),
    ]  # fmt: skip
    launch.loaded_modules.clear()  # a driver that has other handles for modules
    assert graph_nodes.kernels(1)[0] == ("experts", module_hash(RIGHT))
    driver.graphs[3] = []
    assert graph_nodes.kernels(3) == []


class Profiled:
    """torch's profiler, which sees of every replay what the graph holds, and a copy of torch's own."""

    def __init__(self, driver: FakeDriver, graphs: list[DecodeGraph]) -> None:
        self.driver, self.graphs = driver, graphs
        self.names: list[str] = []

    def __call__(self, **_: object) -> Profiled:
        return self

    def __enter__(self) -> Profiled:
        self.before = [g.captured.replays for g in self.graphs]
        return self

    def __exit__(self, *_: object) -> None:
        for graph, before in zip(self.graphs, self.before):
            assert graph.graph is not None
            nodes = graph_nodes.kernels(graph.graph.raw_cuda_graph())
            self.names += ([n.name for n in nodes] + ["copy_kernel"]) * (graph.captured.replays - before)

    def events(self) -> list[SimpleNamespace]:
        cuda, cpu = SimpleNamespace(name="CUDA"), SimpleNamespace(name="CPU")
        at = [SimpleNamespace(start=10.0 * i, end=10.0 * i + 9.0) for i in range(len(self.names))]
        kernels = [SimpleNamespace(name=f"{n}(Args)", time_range=t, device_type=cuda) for n, t in zip(self.names, at)]
        return [*kernels, SimpleNamespace(name="aten::copy_", time_range=at[0], device_type=cpu)]


def test_a_profile_of_graph_replays(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's own path of `halfbyte profile`, over a driver that runs nothing."""
    model = model_with(KernelMoe())
    cache = timeline.fill(model, 2, 128)
    step = timeline.decode_step(model, cache, 40, 1)
    graphs: list[DecodeGraph] = []
    capture = DecodeGraph.capture
    monkeypatch.setattr(DecodeGraph, "capture", lambda self: (graphs.append(self), capture(self)))
    monkeypatch.setattr(timeline, "torch_profile", Profiled(driver, graphs))
    monkeypatch.setattr(timeline, "device_us", lambda work, count: 123.0)
    monkeypatch.setattr(timeline, "device_roof", lambda *_: GPUS["h200"])
    work = {op: Work() for op in OPERATIONS}
    p = timeline._decode_on_gpu(model, step, cache, 3, "decode", work)
    assert p.step_us == 123.0
    assert {line.label: line.launches for line in p.lines} == {"MoE": SMALL.layers, "other": 1.0}
    assert next(line for line in p.lines if line.label == "MoE").category == "moe"
    assert set(p.host_us) == {"graph", "eager"}
    assert model.plan.differences() == []
