"""Which kernels run inside vLLM, for GPUs that nobody has here, with vLLM's capability faked; and the record of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte import formats
from halfbyte.errors import GateError, PlanError
from halfbyte.gates import PRESETS, Gates
from halfbyte.model import checkpoint
from halfbyte.model.config import NAMED
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.step import REGIMES
from halfbyte.vllm_plugin import compat
from halfbyte.vllm_plugin.inside import Inside, PluginOptions, read_options, rejoined
from halfbyte.vllm_plugin.selection import Shapes, choose

BIG = Shapes(36, 2880, 2880, 128, 4, 64, 8, 64, 201088, 128)
SMALL = Shapes(2, 64, 64, 4, 2, 4, 2, 16, 128, 32, dense="f32")


def names(arch: str, gates: Gates, operation: str) -> set[str]:
    _, chosen, _ = choose(BIG, gates, ARCHES[arch])
    return {p.name for regime in REGIMES for p in chosen[regime] if operation in p.covers}


@pytest.mark.parametrize("activation", ["auto", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("arch", ["sm120", "sm121"])
def test_no_marlin_on_sm12x(arch: str, activation: str) -> None:
    """All four layer groups are ours, in every regime, with block-scaled products where activations are."""
    gates = Gates(layers="all", activation=activation)  # type: ignore[arg-type]
    for operation in ("moe", "qkv", "o", "lm_head"):
        found = names(arch, gates, operation)
        wanted = "cuda.grouped_sync" if activation == "auto" else f"cuda.grouped_{activation}"
        assert all(name.startswith(wanted) for name in found), found
    _, _, selection = choose(BIG, gates, ARCHES[arch])
    assert not [n for phases in selection.chosen.values() for n in phases if "marlin" in n]
    assert {selection.layouts[r] for r in ("qkv", "o", "gate_up", "down", "lm_head")} == {"tile16"}


def test_dense_layers_of_the_checkpoint_stay_vllms_unless_asked() -> None:
    assert names("sm90", Gates(), "qkv") == {"vllm.qkv"}
    assert names("sm90", Gates(linear_kernel="cuda"), "qkv") == {"cuda.grouped_qkv"}  # type: ignore[arg-type]
    assert names("sm90", Gates(), "moe") == {"cuda.grouped_moe"}
    assert names("sm90", Gates(moe_kernel="vllm"), "moe") == {"vllm.moe"}  # type: ignore[arg-type]


def test_presets_of_the_comparison() -> None:
    assert names("sm121", PRESETS["baseline"].gates, "moe") == {"vllm.moe_marlin"}
    for letter in "abcde":
        assert names("sm121", PRESETS[letter].gates, "moe") == {"vllm.moe_cutlass"}
        with pytest.raises(PlanError, match="sm90 has not; use --activation bf16"):
            choose(BIG, PRESETS[letter].gates, ARCHES["sm90"])
    assert names("sm90", Gates(moe_kernel="cutlass", activation="bf16"), "moe") == {"vllm.moe_cutlass"}  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="written for sm90, not sm121"):
        choose(BIG, Gates(moe_kernel="cutlass", activation="bf16"), ARCHES["sm121"])  # type: ignore[arg-type]


def test_a_share_of_the_model() -> None:
    config = NAMED["120b"]
    hf = SimpleNamespace(
        num_hidden_layers=36, hidden_size=2880, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=201088, sliding_window=128,
    )  # fmt: skip
    assert Shapes.of(hf) == BIG
    assert (BIG.hidden, BIG.vocab, BIG.experts) == (config.hidden, config.vocab, config.experts)
    half = Shapes.of(hf, 2)
    assert (half.heads, half.kv_heads, half.intermediate, half.vocab) == (32, 4, 1440, 100544)


# ---- versions and capability -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0.26.0", "0.26.3+cu130", "0.32.0", "0.32.1rc2"])
def test_versions_that_are_known(text: str) -> None:
    assert compat.version_of(text).first == tuple(int(n) for n in text.split(".")[:2])


@pytest.mark.parametrize("text", ["0.25.9", "0.27.0", "0.33.0", "1.0", "dev"])
def test_versions_that_are_not(text: str) -> None:
    with pytest.raises(PlanError, match=r"vLLM 0\.26, 0\.32, but .* is installed"):
        compat.version_of(text)


def fake_vllm(monkeypatch: pytest.MonkeyPatch, version: str, capability: tuple[int, int] = (12, 1)) -> None:
    platform = SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, get_device_capability=lambda: capability, device_name="cuda"
    )
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": platform},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def test_register_refuses_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(monkeypatch, "0.99.0")
    with pytest.raises(PlanError, match=r"0\.99\.0 is installed"):
        compat.register()


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(PlanError, match="vLLM is not installed here"):
        compat.register()


def test_the_selection_with_a_faked_gb10(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(monkeypatch, "0.32.0", (12, 1))
    arch = compat.arch_here()
    assert arch.name == "sm121"
    _, chosen, _ = choose(BIG, Gates(layers="all", activation="mxfp8"), arch)  # type: ignore[arg-type]
    assert [p.name for p in chosen["decode"] if "moe" in p.covers] == ["cuda.grouped_mxfp8_moe"]
    fake_vllm(monkeypatch, "0.32.0", (8, 9))
    assert compat.arch_here().name == "sm89"
    fake_vllm(monkeypatch, "0.32.0", (7, 5))
    with pytest.raises(PlanError, match="sm75"):
        compat.arch_here()


def test_a_layer_that_somebody_else_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    with pytest.raises(PlanError, match=r"registered by .*Other: "):
        compat._only_ours("the layer", "ParallelLMHead", Other, object)
    compat._only_ours("the layer", "ParallelLMHead", Other, Other)
    compat._only_ours("the layer", "ParallelLMHead", None, Other)


# ---- options and record ----------------------------------------------------------------------------------------------


def test_options() -> None:
    assert read_options({}) == PluginOptions()
    assert read_options(None) == PluginOptions()
    options = read_options({"halfbyte": {"gates": {"moe_kernel": "triton"}, "record": "x.json"}, "other": 1})
    assert (options.gates.moe_kernel.decode, options.record) == ("triton", Path("x.json"))
    assert read_options({"halfbyte": {"unit": "operations"}}).unit == "operations"
    for bad in ({"halfbyte": {"gate": {}}}, {"halfbyte": 3}, {"halfbyte": {"gates": {"tile": 64}}}):
        with pytest.raises(GateError, match="additional-config"):
            read_options(bad)
    with pytest.raises(GateError, match="there is no gate 'kernel'"):
        read_options({"halfbyte": {"gates": {"kernel": "x"}}})


def random_operations(inside: Inside) -> dict[str, Any]:
    s, g = SMALL, torch.Generator().manual_seed(0)

    def dense(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * 0.1

    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    return {
        "qkv": inside.take("qkv", 0, qkv=dense(qkv, s.hidden), qkv_bias=dense(qkv)),
        "o": inside.take("o", 0, o=dense(s.hidden, s.heads * s.head_dim), o_bias=dense(s.hidden)),
        "moe": inside.take(
            "moe", 0, gate_up=formats.quantize(dense(s.experts, 2 * s.intermediate, s.hidden), "mxfp4"),
            down=formats.quantize(dense(s.experts, s.hidden, s.intermediate), "mxfp4"),
            gate_up_bias=dense(s.experts, 2 * s.intermediate), down_bias=dense(s.experts, s.hidden),
        ),
        "lm_head": inside.take("lm_head", None, lm_head=dense(s.vocab, s.hidden)),
    }  # fmt: skip


def run_step(bound: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    s, g = SMALL, torch.Generator().manual_seed(rows)
    h = torch.randn((rows, s.hidden), generator=g)
    attn = Activations(attn=torch.randn((rows, s.heads * s.head_dim), generator=g))
    ids = torch.tensor([[r % s.experts, (r + 1) % s.experts] for r in range(rows)], dtype=torch.int32)
    routed = Activations(h=h, topk_ids=ids, topk_weights=torch.full((rows, s.top_k), 0.5))
    return {
        "qkv": rejoined(bound["qkv"].run(rows, Activations(h=h)), (s.heads + 2 * s.kv_heads) * s.head_dim),
        "o": bound["o"].run(rows, bound["o"].without_residual(attn, s.hidden)).x,
        "moe": bound["moe"].run(rows, bound["moe"].without_residual(routed, s.hidden)).x,
        "lm_head": bound["lm_head"].run(rows, Activations(h=h)).logits,
    }


def test_what_ran_is_counted_and_written(tmp_path: Path) -> None:
    gates = Gates(layers="all", activation="f32")  # type: ignore[arg-type]
    inside = Inside(PluginOptions(gates, tmp_path / "ran.json"), ARCHES["cpu"], SMALL)
    bound = random_operations(inside)
    assert [str(d) for d in inside.differences()] == [
        f"cpu.{operation} (decode): was chosen and never ran" for operation in ("moe", "qkv", "o", "lm_head")
    ]
    for rows in (1, 3, 20):
        run_step(bound, rows)
    assert inside.differences() == []
    inside.write()
    report = json.loads((tmp_path / "ran.json").read_text(encoding="utf-8"))
    assert report["differences"] == []
    decode = {p["phase"]: p for p in report["record"]["regimes"]["decode"][0]["phases"]}
    assert decode["cpu.moe"]["runs"] == 2
    assert decode["cpu.moe"]["rows"] == [1, 3]
    assert decode["cpu.moe"]["formats"] == {"gate_up": "mxfp4", "down": "mxfp4"}
    assert decode["cpu.qkv"]["kernels"][0]["name"].endswith("hb_run_product")
    assert report["gates"] == gates.as_dict()
    assert not list(tmp_path.glob("*.part"))


def test_a_record_finds_its_folder_made_and_a_step_survives_one_that_cannot_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gates = Gates(layers="all", activation="f32")  # type: ignore[arg-type]
    there = Inside(PluginOptions(gates, tmp_path / "new" / "ran.json"), ARCHES["cpu"], SMALL)
    there.write()
    assert (tmp_path / "new" / "ran.json").exists()
    (tmp_path / "file").touch()
    nowhere = Inside(PluginOptions(gates, tmp_path / "file" / "ran.json"), ARCHES["cpu"], SMALL)
    run_step(random_operations(nowhere), 1)
    assert "halfbyte cannot write the record to" in caplog.text
    assert nowhere.differences() == []


def test_ours_and_the_reference_agree() -> None:
    results = []
    for kernel in ("cpu", "reference"):
        gates = Gates(layers="all", activation="f32", moe_kernel=kernel, linear_kernel=kernel)  # type: ignore[arg-type]
        results.append(run_step(random_operations(Inside(PluginOptions(gates), ARCHES["cpu"], SMALL)), 5))
    for operation, ours in results[0].items():
        reference = results[1][operation]
        assert (ours - reference).norm() <= 1e-5 * reference.norm(), operation


@pytest.mark.parametrize("kind", ["mxfp4", "q8"])
def test_norms_move_into_what_is_quantised_inside_vllm(kind: str) -> None:
    """The matrices are those of our own engine; a norm in front of a matrix in the checkpoint's format stays."""
    inside = Inside(PluginOptions(Gates(layers=f"qkv={kind}", activation="f32")), ARCHES["cpu"], SMALL)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(0)
    norm, head_norm = (torch.rand(SMALL.hidden, generator=g).bfloat16() + 0.5 for _ in range(2))
    was, head_was = norm.clone(), head_norm.clone()
    inside.fold("qkv", 0, norm)
    inside.fold("lm_head", None, head_norm)
    rows = (SMALL.heads + 2 * SMALL.kv_heads) * SMALL.head_dim
    matrix = torch.randn(rows, SMALL.hidden, generator=g).bfloat16()
    bound = inside.take("qkv", 0, qkv=matrix, qkv_bias=torch.zeros(rows))
    assert bound is not None
    assert not inside.norms
    assert norm.equal(torch.ones_like(was))
    assert head_norm.equal(head_was)
    h = torch.randn(4, SMALL.hidden, generator=g)
    got = rejoined(bound.run(4, Activations(h=h)), rows)
    expected = h @ formats.dequantize(checkpoint.requantise(matrix, kind, was.float())).T  # type: ignore[arg-type]
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_a_gate_without_a_kernel_is_refused_with_every_reason() -> None:
    with pytest.raises(PlanError, match=r"vllm\.moe_marlin: runs on a GPU"):
        Inside(PluginOptions(PRESETS["baseline"].gates), ARCHES["cpu"], SMALL)
    with pytest.raises(PlanError, match="is written for sm90"):
        Inside(PluginOptions(Gates(moe_kernel="cuda")), ARCHES["sm100"], BIG)  # type: ignore[arg-type]


def test_explain_names_the_kernel_of_each_layer_group() -> None:
    from typer.testing import CliRunner

    from halfbyte.cli.app import app

    words = [
        "explain",
        "--engine",
        "vllm",
        "--arch",
        "sm121",
        "--mxfp4-layers",
        "all",
        "--activation",
        "mxfp8",
        "--json",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output.strip().splitlines()[-1])
    said = next(n for n in answer["notes"] if n.startswith("layer groups"))
    for operation in ("moe", "qkv", "o", "lm_head"):
        assert f"{operation} cuda.grouped_mxfp8_" in said
    assert not [n for names in answer["chosen"].values() for n in names if "marlin" in n]
    words = ["explain", "--engine", "vllm", "--arch", "sm90", "--moe-kernel", "decode=gemv", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output.strip().splitlines()[-1])
    assert answer["chosen"]["decode"][0] == "cuda.decode_layers"


@pytest.mark.slow
def test_the_proof_shows_block_scaled_instructions_in_every_layer_group() -> None:
    """Compiles for a GB10: minutes. By default activations are bf16, so the proof goes on to what makes them native."""
    from typer.testing import CliRunner

    from halfbyte.cli.app import app

    result = CliRunner().invoke(app, ["explain", "--engine", "vllm", "--arch", "sm121", "--prove", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output.strip().splitlines()[-1])
    for group, said in answer["block_scaled"].items():
        assert "cuda.grouped_mxfp8" in said, group
        assert "QMMA.SF" in said, group
    assert set(answer["block_scaled"]) == set(answer["layer_groups"]) == {"moe", "qkv", "o", "lm_head"}
    assert "marlin" not in json.dumps([answer["block_scaled"], answer["layer_groups"], answer["chosen"]]).lower()
