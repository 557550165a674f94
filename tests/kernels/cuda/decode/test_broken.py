"""A NaN or an infinity anywhere in the weights or in the cache ends in logits that are no numbers, and says where.

The other rows of the step keep their bits. On the emulator everywhere, with the NaN that CUDA makes and with the one
that the CPU makes (no rounding to fewer bits treats the two alike); on a GPU where there is one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.device.host import KernelMachine, gpu
from halfbyte.plan.broken import PLACES, broken_place
from tests.kernels.cuda.decode.decode_models import Case, small
from tests.kernels.cuda.emulator import Emulator

QKV, ATTENTION, O, ROUTER, GATE_UP, DOWN = PLACES
LAYER = 1  # the one with full attention
SHORT, LONG = (110, 70), (700, 650)  # positions of two rows: every block attends for itself; parts are passed on
CODES = {"nan": 0x7FFF, "-nan": 0xFFC0, "inf": 0x7F80, "-inf": 0xFF80}  # in bf16
TENSORS = {  # of the layer -> where the kernel meets them first
    "attn_norm": QKV, "qkv_bias": QKV, "o_bias": O, "mlp_norm": ROUTER, "router": ROUTER, "router_bias": ROUTER,
    "gate_up_bias": GATE_UP, "down_bias": DOWN, "sinks": O, "qkv": QKV, "o": O, "gate_up": GATE_UP, "down": DOWN,
}  # fmt: skip
CHUNK = {"mxfp4": (512, 32), "q8": (1024, 64), "bf16": (2048, 0)}  # bytes of 16 rows and 64 k: values, then scales


def tiny(rows: int = 2, dense: str = "mxfp4", nan: str = "cuda") -> StepShape:
    """As small as the kernel is served."""
    shape = StepShape(128, 64, 2, 32, 8, 1, 64, rows=rows, qkv=dense, o=dense, lm_head=dense, workers=8)
    return replace(shape, defines=("HB_CUDA_NAN",)) if nan == "cuda" else shape


class Model:
    """Two rows of two sequences."""

    def __init__(
        self, shape: StepShape, machine: KernelMachine, positions: tuple[int, int] = SHORT, device: str = "cpu"
    ) -> None:
        self.case = Case(shape, machine, 2, 12, device)
        self.positions, self.shape = positions, shape
        self.layers = list(self.case.step.weights.layers)

    def run(self) -> Tensor:
        step, device = self.case.step, self.case.device
        for buffer, values in ((step.tokens, (17, 18)), (step.positions, self.positions), (step.row_seq, (0, 1))):
            buffer[:2] = torch.tensor(values, dtype=torch.int32, device=device)
        step.run(2)
        return step.logits[:2].cpu()

    def places(self) -> list[str | None]:
        """What every logit of each row says."""
        logits = self.run()
        found: list[str | None] = []
        for row in logits:
            said = {broken_place(bits) for bits in row.view(torch.int32).tolist()}
            assert len(said) == 1
            assert torch.isfinite(row).all() == (said == {None})
            found.append(said.pop())
        assert (self.case.step.next_tokens[:2] < 0).tolist() == [place is not None for place in found]
        assert not self.case.step.boxes["broken"].any(), "the next step begins without"
        return found

    def plant(self, name: str, kind: str) -> str | None:
        """Breaks a tensor, says where the kernel meets it, and puts it right again."""
        tensor = getattr(self.layers[LAYER], name)
        before = tensor.clone()
        if name in ("qkv", "o", "gate_up", "down"):
            self._plant_matrix(tensor, getattr(self.shape, name, "mxfp4"), CODES[kind])
        else:
            halves = tensor.view(torch.int16).view(-1, tensor.shape[-1])
            halves[:, tensor.shape[-1] // 2] = CODES[kind] - (CODES[kind] >> 15 << 16)
        found = self.places()
        tensor.copy_(before)
        assert found[0] == found[1]
        return found[0]

    @staticmethod
    def _plant_matrix(matrix: Tensor, format: str, code: int) -> None:
        """A weight where the format has one that is no number, else scales: 255 of E8M0, or a half."""
        values, scales = CHUNK[format]
        chunks = matrix.view(-1, values + scales)
        if format == "mxfp4":
            chunks[:, values:] = 255
        elif format == "q8":
            chunks[:, values:].view(torch.int16)[:, :2] = 0x7C00 | (0x200 if code & 0x7F else 0)
        else:
            chunks.view(torch.int16)[:, 5] = code - (code >> 15 << 16)


def at(place: str, layer: int = LAYER) -> str:
    return f"layer {layer}, {place}"


def machines() -> list[object]:
    on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    return ["cuda", pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=[pytest.mark.gpu, on_gpu])]


def model_on(where: str, shape: StepShape, positions: tuple[int, int] = SHORT) -> Model:
    if where == "gpu":
        return Model(replace(shape, defines=(), workers=0), gpu(), positions, "cuda")
    return Model(replace(shape, defines=("HB_CUDA_NAN",) if where == "cuda" else ()), Emulator(3), positions)


@pytest.mark.parametrize("where", machines())
@pytest.mark.parametrize("kind", ["nan", *(pytest.param(k, marks=pytest.mark.slow) for k in ("-nan", "inf", "-inf"))])
def test_every_tensor_of_a_layer(where: str, kind: str) -> None:
    model = model_on(where, tiny())
    clean = model.run()
    found = {name: model.plant(name, kind) for name in TENSORS}
    expected: dict[str, str | None] = {name: at(place) for name, place in TENSORS.items()}
    if kind == "-inf":
        expected["sinks"] = None  # a head without a sink: numbers come of it
    assert found == expected
    assert torch.equal(model.run(), clean), "nothing of it is left"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cuda", *machines()[2:]])
@pytest.mark.parametrize(("dense", "rows"), [("bf16", 1), ("q8", 2), ("q8", 4), ("bf16", 8)])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_other_formats_and_rows(where: str, dense: str, rows: int, kind: str) -> None:
    model = model_on(where, tiny(max(rows, 2), dense))
    for name in TENSORS:
        assert model.plant(name, kind) == at(TENSORS[name]), name


@pytest.mark.parametrize("where", machines())
@pytest.mark.parametrize("positions", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_keys_and_values_of_one_sequence(where: str, positions: tuple[int, int]) -> None:
    """The other sequence's logits keep their bits. With parts, the block that met it says so."""
    model = model_on(where, tiny(), positions)
    clean = model.run()
    pool, table = model.case.theirs, model.case.tables
    for layer in range(2):
        page = int(table[layer][0, 1 if layer or positions is SHORT else positions[0] // 64])
        for which in range(2):
            for code in (0x7FFF, 0xFF80) if positions is SHORT else CODES.values():
                words = pool[page, 0, which, 0, 20 if positions is SHORT else 1].view(torch.int16)
                before = words.clone()
                words[9] = code - (code >> 15 << 16)
                found = model.places()
                passed_on = layer and positions is LONG
                assert found == [at(ATTENTION if passed_on else O, layer), None], (layer, which, hex(code))
                assert torch.equal(model.case.step.logits[1].cpu(), clean[1])
                words.copy_(before)
    assert model.places() == [None, None]


@pytest.mark.parametrize("where", machines())
def test_embedding_and_head(where: str) -> None:
    model = model_on(where, tiny())
    weights, clean = model.case.step.weights, model.run()
    for code in (0x7FC0, 0x7F80, 0xFF80, 0x7149):  # the last is 1e30: its square is infinite
        row = weights.embed[17].view(torch.int16)
        before = row.clone()
        row[3] = code - (code >> 15 << 16)
        assert model.places() == [at(QKV, 0), None]
        assert torch.equal(model.case.step.logits[1].cpu(), clean[1])
        row.copy_(before)
    norm = weights.final_norm.clone()
    weights.final_norm[3] = float("nan")
    assert torch.isnan(model.run()).all()
    assert model.case.step.next_tokens[:2].tolist() == [-1, -1]
    weights.final_norm.copy_(norm)
    weights.lm_head.view(-1, 544)[:1, 512:] = 255  # the scales of 16 tokens
    logits = model.run()
    assert not torch.isfinite(logits[:, :16]).any()
    assert torch.equal(logits[:, 16:], clean[:, 16:])
    assert model.case.step.next_tokens[:2].tolist() == [-1, -1], "the highest logit is no longer known"


def test_places_read_what_kernels_write() -> None:
    for layer in (0, 35):
        for place, name in enumerate(PLACES):
            code = 0xFFFE - (8 * layer + place)  # decode/mailbox.cuh: the first place has the largest
            assert broken_place(0x7FC00000 | code) == f"layer {layer}, {name}"
    for bits in (0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x3F800000, -1):
        assert broken_place(bits) is None


def test_what_is_large_is_a_number_still() -> None:
    """A residual of a hundred thousand is nothing to stop for."""
    shape = small(1)
    case = Case(shape, Emulator(3), 1, 4)
    case.step.weights.embed[17, 3] = 1e5
    case.step.tokens[0], case.step.positions[0] = 17, 70
    case.step.run(1)
    assert torch.isfinite(case.step.logits).all()


@pytest.mark.parametrize(("size", "broken"), [(2.0**28, False), (2.0**34, True)])
def test_router_logits_are_bounded_by_their_sum_and_not_by_their_parts(size: float, broken: bool) -> None:
    """Two parts beyond what a block may add, of opposite signs and added up by one set of warps, leave no trace."""
    shape = replace(tiny(), hidden=256)
    model = model_on("cuda", shape)
    layer = model.layers[0]
    values, scales = CHUNK["mxfp4"]
    layer.o.view(-1, values + scales)[:, values:] = 0  # the stream is still the embedding where the router reads it
    for channel, sign in ((0, 1.0), (48, -1.0)):  # of tiles 0 and 3: three sets of warps take the tiles in turn
        model.case.step.weights.embed[:, channel] = 1.0
        layer.o_bias[channel], layer.mlp_norm[channel] = 0.0, 1.0
        layer.router[channel // 16, :, channel % 16] = sign * size
    assert model.places() == ([at(ROUTER, 0)] * 2 if broken else [None] * 2)
