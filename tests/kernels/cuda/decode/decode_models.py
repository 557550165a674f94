"""Small random models in the kernel's own layouts, and steps of them beside the oracle's."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.checks import decode_oracle as oracle
from halfbyte import formats
from halfbyte.formats import tile16
from halfbyte.formats.layouts import convert
from halfbyte.kernels.cuda.decode.shape import KV_DTYPES, StepShape
from halfbyte.kernels.cuda.decode.step import DecodeStep, StepLayer, StepWeights, tile_router
from halfbyte.kernels.cuda.device.host import KernelMachine
from halfbyte.ops.rope import rope_table, yarn_frequencies

# Split activations keep 16 bits of mantissa, so each phase is within a few 1e-6 of float32. A cached key that rounds to
# the other bf16 neighbour moves one attention score by up to 2^-9; over few tokens that shows.
TIGHT, LOOSE = 5e-4, 3e-3


def make_matrix(g: torch.Generator, *size: int, format: str, layout: str = "tile16") -> Tensor:
    """Random weights of a scale that keeps activations near one, as bytes of tile16, or of another layout of MXFP4."""
    w = torch.randn(size, generator=g) / size[-1] ** 0.5
    if format == "bf16":
        return tile16.pack_dense(w.bfloat16())
    return convert(formats.quantize(w, format), layout).data  # type: ignore[arg-type]


def make_weights(s: StepShape, seed: int = 0) -> StepWeights:
    g = torch.Generator().manual_seed(seed)

    def vector(*size: int, scale: float = 0.3, shift: float = 0.0) -> Tensor:
        return (torch.randn(size, generator=g) * scale + shift).bfloat16()

    layers = [
        StepLayer(
            qkv=make_matrix(g, s.qkv_dim, s.hidden, format=s.format_of("qkv", index)),
            o=make_matrix(g, s.hidden, s.q_dim, format=s.format_of("o", index)),
            gate_up=make_matrix(g, s.experts, 2 * s.intermediate, s.hidden, format="mxfp4", layout=s.expert_layout),
            down=make_matrix(g, s.experts, s.hidden, s.intermediate, format="mxfp4", layout=s.expert_layout),
            qkv_bias=vector(s.qkv_dim), o_bias=vector(s.hidden), gate_up_bias=vector(s.experts, 2 * s.intermediate),
            down_bias=vector(s.experts, s.hidden), attn_norm=vector(s.hidden, shift=1.0),
            mlp_norm=vector(s.hidden, shift=1.0), router=tile_router(vector(s.experts, s.hidden, scale=s.hidden**-0.5)),
            router_bias=vector(s.experts), sinks=vector(s.heads, scale=1.0),
        )
        for index in range(s.layers)
    ]  # fmt: skip
    return StepWeights(
        layers, vector(s.vocab, s.hidden, scale=1.0), vector(s.hidden, shift=1.0),
        make_matrix(g, s.vocab, s.hidden, format=s.lm_head),
    )  # fmt: skip


def make_rope(positions: int) -> Tensor:
    inverse, temperature = yarn_frequencies(64, 150000.0, 32.0, 4096, 32.0, 1.0, False)
    return torch.cat(rope_table(inverse, temperature, torch.arange(positions)), -1).contiguous()


def make_cache(s: StepShape, sequences: int, blocks: int, seed: int = 1) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A pool full of random keys and values, with NaN in every page no table names, and two shuffled tables."""
    g = torch.Generator().manual_seed(seed)
    count = 2 * sequences * blocks
    pool = torch.randn((count + 3, (s.layers + 1) // 2, 2, s.kv_heads, 64, 64), generator=g)
    order = torch.randperm(count, generator=g).int() + 1
    pool[count + 1 :] = float("nan")
    return pool.to(KV_DTYPES[s.kv]), (
        order[: count // 2].view(sequences, blocks).contiguous(),
        order[count // 2 :].view(sequences, blocks),
    )


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def small(rows: int, formats: tuple[str, str, str] = ("mxfp4",) * 3) -> StepShape:
    """Every size different from every other, two kinds of layer, tiles that do not divide evenly over the blocks."""
    qkv, o, head = formats
    return StepShape(192, 128, 3, 32, 16, 2, 512, rows=rows, qkv=qkv, o=o, lm_head=head)


class Case:
    """One model with its cache, twice: one for the kernel, one for the oracle."""

    def __init__(
        self,
        shape: StepShape,
        machine: KernelMachine,
        sequences: int,
        blocks: int,
        device: str = "cpu",
        *,
        octaves: int = 0,
    ) -> None:
        """`octaves`: by which all that is added to the residual is louder."""
        self.shape, self.device = shape, device
        weights = make_weights(shape)
        weights.embed *= 2.0**octaves
        for layer in weights.layers:
            for matrix, bias in ((layer.o, layer.o_bias), (layer.down, layer.down_bias)):
                if octaves:
                    matrix[..., 512:] += octaves  # the codes of the scales
                bias *= 2.0**octaves
        pool, tables = make_cache(shape, sequences, blocks)
        rope = make_rope(blocks * 64)
        self.weights, self.pool, self.tables, self.rope = weights, pool, tables, rope
        move = lambda t: t.to(device).clone()  # noqa: E731
        there = type(weights)(
            [type(x)(**{k: move(v) for k, v in vars(x).items()}) for x in weights.layers],
            move(weights.embed), move(weights.final_norm), move(weights.lm_head),
        )  # fmt: skip
        self.theirs = move(pool)
        self.step = DecodeStep(
            shape, there, machine, pool=self.theirs, tables=(move(tables[0]), move(tables[1])), rope=move(rope)
        )

    def run(self, tokens: list[int], positions: list[int], row_seq: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        n = len(tokens)
        t, p, q = (torch.tensor(v, dtype=torch.int32) for v in (tokens, positions, row_seq))
        self.step.tokens[:n], self.step.positions[:n], self.step.row_seq[:n] = (v.to(self.device) for v in (t, p, q))
        self.step.run(n)
        want = oracle.step(self.shape, self.weights, self.pool, self.tables, self.rope, t, p, q)
        last = want.layers[-1]
        values = {name: (v, getattr(last, name)) for name, v in oracle.last_layer(self.step).items()}
        values["logits"] = self.step.logits, want.logits
        pairs = {name: torch.stack((v[:n].cpu().double(), w.double())) for name, (v, w) in values.items()}
        return pairs, self.step.next_tokens[:n].cpu()


def compare(case: Case, tokens: list[int], positions: list[int], row_seq: list[int], bound: float) -> None:
    pairs, token = case.run(tokens, positions, row_seq)
    errors = {k: relative(v[0], v[1]) for k, v in pairs.items()}
    assert max(errors.values()) < bound, errors
    assert token.tolist() == pairs["logits"][0].argmax(-1).tolist()
    ours, theirs = torch.nan_to_num(case.pool.float()), torch.nan_to_num(case.theirs.cpu().float())
    assert relative(theirs, ours) < LOOSE
