"""Random checkpoints: the same for the same seed, tensor by tensor, and healthy as a network."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.tensor import MXTensor
from halfbyte.model import load, synthetic
from halfbyte.model.config import NAMED, ModelConfig
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.weights import roles, shape_of
from halfbyte.plan.activations import Activations
from tests.reference import REFERENCE

DEEP = ModelConfig(  # as deep as 120b, narrow enough for a test
    layers=36, hidden=256, intermediate=256, experts=32, top_k=4, heads=8, kv_heads=2, head_dim=32, vocab=2048,
    eos_tokens=(1,), pad_token=0,
)  # fmt: skip
TOKENS = 160  # past the window


class Watched(Activations):
    """The activations of a run, each assignment kept."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Tensor):
            self.seen.setdefault(name, []).append(value.clone())


@pytest.fixture(scope="module", params=["small", "deep"])
def run(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, list[Tensor]]]:
    config = {"small": NAMED["small"], "deep": DEEP}[request.param]
    return config, activations(config, synthetic.TAME)


def activations(config: ModelConfig, character: synthetic.Character) -> dict[str, list[Tensor]]:
    model = GptOss(synthetic.make(config, 0, character=character), REFERENCE)
    watched = Watched()
    tokens = torch.randint(0, config.vocab, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    plain: Any = model
    plain.forward = lambda step: model.plan.run(step, watched).logits
    SingleSequence(model, TOKENS).feed(tokens, all_logits=True)
    assert len(watched.seen["topk_ids"]) == config.layers
    return watched.seen


def rms(x: Tensor) -> float:
    return float(x.float().pow(2).mean().sqrt())


def test_tokens_spread_over_experts(run: tuple[ModelConfig, dict[str, list[Tensor]]]) -> None:
    config, seen = run
    generator = torch.Generator().manual_seed(1)
    worst = 1.0
    for batch in (1, 4, 8, 16):
        uniform = config.experts * (1 - (1 - config.top_k / config.experts) ** batch)
        for ids in seen["topk_ids"]:
            picks = [ids[torch.randperm(TOKENS, generator=generator)[:batch]] for _ in range(100)]
            unique = sum(len(torch.unique(p)) for p in picks) / len(picks)
            worst = min(worst, unique / uniform)
            assert 0.9 * uniform <= unique <= 1.1 * uniform
    print(f"{config.layers} layers, {config.experts} experts: at worst {worst:.3f} of uniform routing's unique experts")


def test_routing_depends_on_the_token(run: tuple[ModelConfig, dict[str, list[Tensor]]]) -> None:
    """Tokens stay apart in the residual stream, and two tokens share no more experts than chance and a bit."""
    config, seen = run
    x = torch.nn.functional.normalize(seen["x"][-1].float(), dim=-1)
    alike = (x @ x.T).triu(1).sum() / (TOKENS * (TOKENS - 1) / 2)
    assert alike < 0.1
    chance = config.top_k**2 / config.experts
    chosen = torch.nn.functional.one_hot(seen["topk_ids"][-1], config.experts).sum(1).float()
    shared = (chosen @ chosen.T).triu(1).sum() / (TOKENS * (TOKENS - 1) / 2)
    assert shared < 1.5 * chance


def test_activations_stay_sane(run: tuple[ModelConfig, dict[str, list[Tensor]]]) -> None:
    _, seen = run
    stream = [rms(x) for x in seen["x"]]
    assert 0.9 < stream[0] < 1.1
    assert all(a < b * 1.05 for a, b in itertools.pairwise(stream))  # grows
    assert stream[-1] < 5  # slowly
    attention = torch.stack([(after - before).float() for before, after in zip(seen["x"][0::2], seen["x"][1::2])])
    experts = torch.stack([(after - before).float() for before, after in zip(seen["x"][1::2], seen["x"][2::2])])
    assert 0.1 < rms(attention) < 1  # each half of a layer does something
    assert 0.1 < rms(experts) < 1
    assert 1 < float(seen["logits"][0].std()) < 3
    weights = torch.stack(seen["topk_weights"]).mean((0, 1))
    assert 0.3 < weights[0] < 0.7
    assert weights[-1] > 0.05


def test_attention_is_neither_uniform_nor_one_hot_and_sinks_matter() -> None:
    config = NAMED["small"]
    made = synthetic.make(config, 0)
    layer = made.layers[0]
    assert isinstance(layer.qkv, Tensor)
    x = made.embed[torch.arange(config.window)].float()
    x = x / x.pow(2).mean(-1, keepdim=True).sqrt() * layer.attn_norm.float()
    qkv = x @ layer.qkv.float().T + layer.qkv_bias.float()
    q = qkv[-1, : config.q_dim].view(config.heads, config.head_dim)
    k = qkv[:, config.q_dim : config.q_dim + config.kv_dim].view(-1, config.kv_heads, config.head_dim)
    k = k.repeat_interleave(config.heads // config.kv_heads, dim=1)
    scores = torch.einsum("hd,nhd->hn", q, k) / config.head_dim**0.5
    p = torch.softmax(torch.cat([scores, layer.sinks.float()[:, None]], dim=-1), dim=-1)
    effective = 1 / p[:, :-1].pow(2).sum(-1)
    assert 2 < float(effective.median()) < config.window / 2
    assert 0.01 < float(p[:, -1].mean()) < 0.5


def test_clamps_are_reached(run: tuple[ModelConfig, dict[str, list[Tensor]]]) -> None:
    config, seen = run
    layer = synthetic.make(config, 0).layers[0]
    assert isinstance(layer.gate_up, MXTensor)
    h = seen["h"][1].float()  # after the first layer's mlp_norm
    out = torch.einsum("rk,enk->ren", h, formats.dequantize(layer.gate_up)) + layer.gate_up_bias.float()
    share = float((out.abs() > config.swiglu_limit).float().mean())
    assert 1e-5 < share < 0.01


# ---- determinism ---------------------------------------------------------------------------------------------------


def digest(config: ModelConfig, seed: int, layer: int | None, role: str) -> str:
    made = synthetic.SyntheticSource(config, seed).make(layer, role)
    tensors = (made.data, made.scales) if isinstance(made, MXTensor) else (made,)
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def test_a_tensor_made_alone_is_the_one_in_the_model() -> None:
    config = NAMED["small"]
    made = synthetic.make(config, 11)
    source = synthetic.SyntheticSource(config, 11)
    for layer, role in ((None, "lm_head"), (3, "down"), (0, "qkv"), (2, "sinks")):
        whole = getattr(made if layer is None else made.layers[layer], role)
        alone = source.make(layer, role)
        if isinstance(alone, MXTensor):
            assert alone.data.equal(whole.data)
            assert alone.scales.equal(whole.scales)
        else:
            assert alone.equal(whole)


def test_every_tensor_has_numbers_of_its_own() -> None:
    config = NAMED["small"]
    seen = [digest(config, 0, layer, role) for layer, role in roles(config)]
    seen += [digest(config, 1, layer, role) for layer, role in roles(config)]
    assert len(set(seen)) == len(seen)


def test_numbers_do_not_depend_on_the_machine() -> None:
    """Written down once: a change here changes every stored result that names a seed."""
    config = NAMED["small"]
    assert digest(config, 0, None, "embed") == EMBED
    assert digest(config, 0, 1, "gate_up") == GATE_UP
    assert digest(config, 0, 1, "down") == DOWN


EMBED, GATE_UP, DOWN = "90c677e6144a6dc2", "6d664acae0ab2826", "15764a4fa5c111c9"


def test_rows_of_down_sum_to_zero_and_magnitudes_are_as_asked() -> None:
    for config in (NAMED["small"], NAMED["20b"].with_(experts=4)):
        source = synthetic.SyntheticSource(config, 2)
        down, gate_up = source.make(0, "down"), source.make(0, "gate_up")
        assert isinstance(down, MXTensor)
        assert isinstance(gate_up, MXTensor)
        values = formats.dequantize(down)
        assert values.sum(-1).abs().max() == 0
        target = synthetic.DOWN_RMS / synthetic.SWIGLU_RMS / config.intermediate**0.5
        assert rms(values) == pytest.approx(target, rel=0.05)
        assert rms(formats.dequantize(gate_up)) == pytest.approx(synthetic.GATE_UP_RMS / config.hidden**0.5, rel=0.05)
        for t in (down, gate_up):
            assert len(torch.unique(t.data)) == 256  # every pair of codes
            assert len(torch.unique(t.scales)) >= 3


def test_the_true_shapes() -> None:
    for name, size in (("120b", 65.2e9), ("20b", 13.8e9)):
        config = NAMED[name]
        source = synthetic.SyntheticSource(config)
        total = sum(source.nbytes(layer, role) for layer, role in roles(config))
        print(f"{name}: {total / 1e9:.1f} GB")
        assert total == pytest.approx(size, rel=0.01)
        assert shape_of(config, "gate_up") == (config.experts, 5760, 2880)


def test_layer_formats_and_layouts() -> None:
    weights = synthetic.make(
        NAMED["small"], 0, layer_formats={"qkv": "q8", "lm_head": "mxfp4"}, layouts={"down": "tile16"}
    )
    assert isinstance(weights.layers[0].qkv, MXTensor)
    assert isinstance(weights.layers[0].down, MXTensor)
    assert isinstance(weights.lm_head, MXTensor)
    assert (weights.layers[0].qkv.format, weights.lm_head.format, weights.layers[0].down.layout) == (
        "q8",
        "mxfp4",
        "tile16",
    )


def test_sizes_that_mxfp4_cannot_hold_are_refused() -> None:
    with pytest.raises(CheckpointError, match="multiples of 32"):
        synthetic.make(NAMED["small"].with_(hidden=250))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_same_seed_gives_the_same_numbers() -> None:
    a, b = (synthetic.make(NAMED["small"], 4, "cuda") for _ in range(2))
    for (_, role, x), (_, _, y) in zip(a.items(), b.items(), strict=True):
        x, y = (t.data if isinstance(t, MXTensor) else t for t in (x, y))
        assert x.device.type == "cuda", role
        assert x.equal(y), role
    down = a.layers[0].down
    assert isinstance(down, MXTensor)
    assert len(torch.unique(down.data)) == 256
    assert formats.dequantize(down).sum(-1).abs().max() == 0


# ---- what is known of real weights ---------------------------------------------------------------------------------


WIDE = DEEP.with_(layers=4, layer_kinds=DEEP.layer_kinds[:4], hidden=768, intermediate=128, vocab=512)


@pytest.fixture(scope="module")
def real_run() -> dict[str, list[Tensor]]:
    return activations(WIDE, synthetic.Character(real=True))


def test_real_weights_hold_what_is_known_of_them() -> None:
    source = synthetic.SyntheticSource(NAMED["small"], 0, character=synthetic.Character(real=True))
    for far in (False, True):
        draw = synthetic._Draw("many", source.device)
        many = synthetic._wide_mxfp4(draw, (512, 32 * 1024), 2.0**-8, balanced=False, far=far)
        codes = many.scales
        counts = torch.bincount(codes.flatten().long(), minlength=256)
        assert int(counts[0]) == int((many.data.view(*codes.shape, 16) == 0).all(-1).sum()) > 0  # groups of zeros
        common = counts.sort(descending=True).indices[:9]
        assert counts[common].sum() > 0.999 * codes.numel()
        used = codes[codes > 0]
        spread = int(used.max()) - int(used.min())
        assert spread >= 18 if far else 14 <= spread <= 16
    late = NAMED["small"].layers - 1
    down = source.make(late, "down")
    assert isinstance(down, MXTensor)
    assert int(down.scales.max()) == 127 + 10
    sinks = source.make(0, "sinks")
    norm = source.make(0, "attn_norm")
    assert isinstance(sinks, Tensor)
    assert isinstance(norm, Tensor)
    assert float(sinks.min()) >= -5
    assert float(sinks.max()) <= 10
    assert float(norm.max() / norm.median()) > 2


def test_some_tensors_of_real_weights_are_too_wide_for_fp8() -> None:
    """As 5 of the 72 of gpt-oss-120b are: loud channels included, every other row is within 16 octaves."""
    config = NAMED["small"].with_(layers=14, layer_kinds=("sliding", "full") * 7, hidden=2048, intermediate=1024)
    source = synthetic.SyntheticSource(config, 0, character=synthetic.Character(real=True))
    wide = []
    for layer in range(config.layers):
        for role in ("gate_up", "down"):
            matrix = source.make(layer, role)
            assert isinstance(matrix, MXTensor)
            codes = matrix.scales.int()
            low = torch.where(codes == 0, 255, codes).amin(-1)
            if int((codes.amax(-1) - low).max()) > 16:
                wide.append((layer, role))
    assert wide == [(6, "down"), (13, "down")]


def test_real_weights_make_a_network_with_two_loud_channels(real_run: dict[str, list[Tensor]]) -> None:
    loud = list(synthetic.SyntheticSource(WIDE, 0).loud_channels)
    last = real_run["x"][-1].float()
    others = last.clone()
    others[:, loud] = 0
    assert 1e4 < float(last[:, loud].abs().max()) < 1e6
    assert 2**12 < rms(others) < 2**14
    assert rms(last[:, loud]) > 4 * rms(others)
    assert torch.isfinite(real_run["logits"][0]).all()
    assert 0.5 < float(real_run["logits"][0].std()) < 5


def test_real_weights_route_as_evenly_as_tame_ones(real_run: dict[str, list[Tensor]]) -> None:
    """98 % of the experts that uniform routing would touch, over a batch of 16 and all layers."""
    generator = torch.Generator().manual_seed(1)
    uniform = WIDE.experts * (1 - (1 - WIDE.top_k / WIDE.experts) ** 16)
    touched = [
        len(torch.unique(ids[torch.randperm(TOKENS, generator=generator)[:16]]))
        for ids in real_run["topk_ids"]
        for _ in range(50)
    ]
    assert sum(touched) / len(touched) >= 0.98 * uniform


def test_skew_favours_some_experts() -> None:
    config = NAMED["small"]
    even, skewed = (
        torch.bincount(torch.cat(activations(config, synthetic.Character(skew=skew))["topk_ids"]).flatten().long())
        for skew in (0.0, 1.0)
    )
    assert float(even.max()) < 1.3 * float(even.min())
    assert float(skewed.max()) > 2 * float(skewed.min())


@pytest.mark.parametrize("options", ["weights=tame2", "skew=x", "seed=3", "skew=9"])
def test_options_of_random_weights_are_checked(options: str) -> None:
    with pytest.raises(UsageError, match="not an option of random weights"):
        load.resolve_model(f"random:small?{options}")


def test_options_of_random_weights() -> None:
    assert load.resolve_model("random:small").character == synthetic.REAL
    assert load.resolve_model("random:small?weights=tame").character == synthetic.TAME
    name = load.resolve_model("random:small?skew=0.6&weights=real")
    assert name.character == synthetic.Character(real=True, skew=0.6)
    model = load.load_model(name)
    assert int(model.weights.layers[-1].down.data.numel()) > 0
    plain = load.load_model(load.resolve_model("random:small?weights=tame"))
    assert not torch.equal(model.weights.layers[0].sinks, plain.weights.layers[0].sinks)
