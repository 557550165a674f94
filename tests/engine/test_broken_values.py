"""A model with a NaN somewhere, behind the engine: who meets it is told, with the layer; the others' tokens are the
same.

On a CPU through the plain plan; on a GPU through every regime, the decode step's own words included.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.padded_model import load_padded
from halfbyte import gates
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Delta, Request, SamplingParams
from halfbyte.formats import DenseTiles
from halfbyte.model import load
from halfbyte.model.diagnose import find_broken
from halfbyte.model.gpt_oss import GptOss
from tests.reference import REFERENCE

NAN, INF = float("nan"), float("inf")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
WORD = 77  # only the request that is to break has it


@pytest.fixture(
    scope="module", params=["cpu", *(pytest.param(p, marks=needs_gpu) for p in ("exact", "balanced", "fast"))]
)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[EngineCore, GptOss]]:
    device = "cpu" if request.param == "cpu" else "cuda"
    g = REFERENCE if device == "cpu" else gates.parse({}, env={}, preset=request.param)
    if device == "cpu":
        model = load.load_model(load.resolve_model("random:small"), g, page_size=64)
    else:
        model = load_padded(g, "cuda")
    core = core_of(model)
    yield core, model
    core.close()


def core_of(model: GptOss) -> EngineCore:
    options = EngineOptions(gates=model.gates, max_context=1024, kv_gib=0.05, reserve_gib=0.0, device=model.device.type)
    return core_for(model, load.tokenizer_of(load.resolve_model(None)), options)[0]


def run(core: EngineCore, prompts: dict[str, list[int]]) -> dict[str, tuple[list[int], Delta]]:
    for id, prompt in prompts.items():
        core.submit(Request(prompt, GREEDY, id=id))
    out: dict[str, tuple[list[int], Delta]] = {}
    while core.has_work:
        for id, delta in core.step():
            tokens = out[id][0] if id in out else []
            out[id] = (tokens + delta.tokens, delta)
        core.check()
    return out


def prompts_of(rows: int, broken: bool, length: int = 40) -> dict[str, list[int]]:
    """`rows` sequences that decode together; the first has the word."""
    made = {f"{i}": [(7 * i + 3 * j) % 70 + 1 for j in range(length)] for i in range(rows)}
    if broken:
        made["broken"] = [WORD, *made["0"]]
    return made


def check_broken(core: EngineCore, rows: int, said: str, length: int = 40) -> None:
    # With a companion as long as the broken one: other numbers of rows are other kernels, which round otherwise.
    prompts = prompts_of(rows, broken=True, length=length)
    clean = run(core, prompts | {"broken": [WORD - 1, *prompts["broken"][1:]]})
    assert all(delta.finish == "length" for _, delta in clean.values())
    del clean["broken"]
    out = run(core, prompts_of(rows, broken=True, length=length))
    tokens, last = out.pop("broken")
    assert last.finish == "error"
    assert tokens == []
    assert said in (last.error or ""), last.error
    assert {id: tokens for id, (tokens, _) in out.items()} == {id: tokens for id, (tokens, _) in clean.items()}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_broken_embedding_breaks_who_has_the_word(engine: tuple[EngineCore, GptOss], rows: int, value: float) -> None:
    core, model = engine
    before = model.weights.embed[WORD].clone()
    model.weights.embed[WORD, 3] = value
    try:
        check_broken(core, rows, "not numbers since the embedding, whose table")
    finally:
        model.weights.embed[WORD] = before
    assert run(core, prompts_of(1, broken=True))["broken"][1].finish == "length", "nothing of it is left in the cache"


TENSORS = ("attn_norm", "qkv_bias", "sinks", "o_bias", "mlp_norm", "router", "router_bias", "gate_up_bias", "down_bias")


@pytest.mark.parametrize("name", TENSORS)
def test_a_broken_tensor_is_named_by_its_layer(engine: tuple[EngineCore, GptOss], name: str) -> None:
    """Everybody meets it: everybody is told, and the engine goes on. Prompts of one token are a decode step, or a batch
    of them. Bound anew: phases may keep vectors in a form of their own."""
    _, model = engine
    tensor = getattr(model.weights.layers[1], name)
    before = tensor.clone()
    tensor.view(-1)[:: max(1, tensor.numel() // 64)] = NAN
    core = core_of(GptOss(model.weights, model.gates))
    try:
        for rows, length in ((1, 1), (5, 1), (1, 40)):
            for tokens, last in run(core, prompts_of(rows, broken=False, length=length)).values():
                assert last.finish == "error"
                assert tokens == []
                assert "layer 1" in (last.error or ""), (rows, length, last.error)
    finally:
        tensor.copy_(before)
        core.close()


def test_broken_keys_and_values_of_one_sequence(engine: tuple[EngineCore, GptOss]) -> None:
    """While it decodes beside others: it ends, they go on."""
    core, model = engine
    pool = model.kv_pool()
    want = run(core, {"other": prompts_of(1, False)["0"]})["other"][0]
    for which in range(2):
        core.submit(Request([WORD, 5, 6], GREEDY, id="mine"))
        core.submit(Request(prompts_of(1, False)["0"], GREEDY, id="other"))
        out: dict[str, tuple[list[int], Delta]] = {}
        planted = False
        while core.has_work:
            for id, delta in core.step():
                out[id] = (out[id][0] if id in out else []) + delta.tokens, delta
            running = [s for s in core.scheduler.running if s.request.id == "mine"]
            if not planted and running and len(running[0].tokens) > 3:
                page = running[0].tables.full[0]
                pool[page, 0, which, 0, 1, 2] = NAN
                planted = True
        assert planted
        assert out["mine"][1].finish == "error"
        assert "layer" in (out["mine"][1].error or "")
        assert out["other"][0] == want
        assert torch.isfinite(pool.float()).all(), "nothing of it is left for the next owner of the page"


def test_the_search_names_what_it_finds() -> None:
    model = load.load_model(load.resolve_model("random:small"), page_size=16)
    model.allocate_kv(8)
    layers = model.config.layers
    assert (
        find_broken(model, [1, 2], [3, 4], 20) == f"layer {layers - 1} behind its keys and values, or the output layer"
    )
    model.kv_pool()[2, 0, 0, 0, 9, 0] = NAN  # token 25: not written
    assert "output layer" in find_broken(model, [1, 2], [3, 4], 20)
    model.kv_pool()[2, 0, 0, 0, 3, 0] = NAN  # token 19 of layer 1, the first full one
    assert find_broken(model, [1, 2], [3, 4], 20) == "layer 0 behind its keys and values, or layer 1 in front of them"
    model.weights.layers[0].down_bias[1, 2] = INF
    assert find_broken(model, [1, 2], [3, 4], 20) == "layer 0, whose down_bias has values that are not finite"
    dense = model.weights.layers[0].qkv
    assert isinstance(dense, torch.Tensor | DenseTiles) or dense.scales.numel()
