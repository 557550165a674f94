"""Random checkpoints of any gpt-oss shape, the same for the same seed: in memory, on a device, or as files.

Each tensor is drawn from a seed made of its own name, so any one can be made alone and a 61 GB checkpoint is written
holding one tensor. On a CPU the numbers come from raw SFC64 bits and are the same on every machine; on a GPU they come
from its own generator, which is far faster and gives *other* numbers: compare within one kind of device only.

The magnitudes make a healthy network out of noise: the residual stream grows slowly, attention is neither uniform nor
one-hot, sinks take a real share, both swiglu clamps are reached now and then, logits have a standard deviation near 2.
Two things keep tokens apart over 36 layers, so that routing goes on depending on the token. Swiglu's output has a mean
that is the same for every token; rows of `down` sum to zero so that it never reaches the residual stream. And the
rows of the router all have the same length, so that no expert is favoured. Nothing here is a model of language.

`Character` draws what is known of the real checkpoints (docs/quality.md) instead of tame numbers, and skewed routing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.tensor import MXTensor
from halfbyte.model.checkpoint import assemble
from halfbyte.model.config import ModelConfig
from halfbyte.model.direct import HostExperts
from halfbyte.model.safetensors_writer import write_folder
from halfbyte.model.weights import Matrix, WeightFormat, Weights, shape_of

DRAW = 1 << 22  # elements drawn at a time on a CPU

# Root mean square of what each projection makes of an input whose elements have mean square 1.
GATE_UP_RMS = 2.0
SWIGLU_RMS = 3.2  # what swiglu makes of that
DOWN_RMS = 0.8
O_RMS = 0.5
QKV_RMS = 1.25
ROUTER_RMS = 1.5
LOGITS_RMS = 2.0
SINK_MEAN, SINK_STD = 5.0, 1.5
NORM_STD = 0.1
BIAS_STD = {"qkv_bias": 0.1, "o_bias": 0.02, "router_bias": 0.05, "gate_up_bias": 0.1, "down_bias": 0.02}

BYTE_SUM_STD = math.sqrt(4 * (256**2 - 1) / 12)
CODE_RMS = math.sqrt(68.5 / 8)  # of the E2M1 codes, each equally likely


# Of real weights, as far as they are known. The residual stream is larger by STREAM_OCTAVES from the embedding on; if
# it began small and grew, the newest layers would be all of it, and tokens would be alike. Two channels are loud from
# an early layer on, and the norms in front of the matrices hold them down.
STREAM_OCTAVES = 12
STREAM_WRITERS = ("embed", "o", "o_bias", "down", "down_bias")
LOUD_FROM_LAYER, LOUD, LOUD_NORM = 2, 20.0, 0.02
NORM_OCTAVES = 0.8  # standard deviation of the norms' binary logarithm
SINK_RANGE = (-5.0, 10.0)
BULK = torch.tensor([bits.bit_count() - 5 for bits in range(128)], dtype=torch.int16)  # eight neighbouring exponents
BULK_SQUARE = (5 / 2) ** 7 / 4**5  # mean of 4^exponent over BULK
RARE = 65_536  # a group in so many is one of zeros, and 8 times as many lie below the bulk
# Scales of a row are within so many octaves; but of down in every seventh layer, 5 of the 72 expert tensors of 120b,
# some lie up to 18 octaves below the bulk.
ROW_OCTAVES, FAR_LAYER = 16, 7


@dataclass(frozen=True)
class Character:
    """What random weights are like. `real`: wide scales, groups of zeros, loud channels, uneven norms, low and high
    sinks. `skew`: the spread of the router's biases, in standard deviations of a token's logits; 0 spreads evenly."""

    real: bool = False
    skew: float = 0.0


TAME, REAL = Character(), Character(real=True)


class SyntheticSource:
    """Every tensor of a checkpoint in OpenAI's formats: MXFP4 experts, bf16 everything else."""

    def __init__(
        self, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu", character: Character = TAME
    ):
        if config.hidden % 32 or config.intermediate % 32:
            raise CheckpointError("MXFP4 experts need hidden and intermediate sizes that are multiples of 32.")
        self.config = config
        self.seed = seed
        self.device = torch.device(device)
        self.character = character

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return ("mxfp4",) if role in ("gate_up", "down") else ("bf16",)

    def nbytes(self, layer: int | None, role: str) -> int:
        elements = math.prod(shape_of(self.config, role))
        return elements * 17 // 32 if role in ("gate_up", "down") else elements * 2

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        return [self.make(layer, role)]

    def make(self, layer: int | None, role: str) -> Matrix:
        c, shape = self.config, shape_of(self.config, role)
        draw = _Draw(f"{self.seed}/{'' if layer is None else layer}/{role}", self.device)
        real = self.character.real
        octaves = STREAM_OCTAVES if real and role in STREAM_WRITERS else 0
        if role in ("gate_up", "down"):
            rms = GATE_UP_RMS / math.sqrt(c.hidden)
            if role == "down":
                rms = DOWN_RMS / SWIGLU_RMS / math.sqrt(c.intermediate)
            if not real:
                return _mxfp4(draw, shape, rms, balanced=role == "down")
            far = role == "down" and layer is not None and layer % FAR_LAYER == FAR_LAYER - 1
            matrix = _wide_mxfp4(draw, shape, rms * 2.0**octaves, balanced=role == "down", far=far)
            if role == "down" and layer is not None and layer >= LOUD_FROM_LAYER:
                self._make_loud(matrix.scales, layer, rms * 2.0**octaves, far=far)
            return matrix
        if role == "router":
            rows = draw.normal(shape, 0.0, 1.0, torch.float32)
            rows *= ROUTER_RMS / rows.norm(dim=-1, keepdim=True)
            return rows.to(torch.bfloat16)
        if role in ("attn_norm", "mlp_norm", "final_norm"):
            return self._uneven_norm(draw, shape) if real else draw.normal(shape, 1.0, NORM_STD)
        if role == "sinks":
            return _between(draw, shape, *SINK_RANGE) if real else draw.normal(shape, SINK_MEAN, SINK_STD)
        if role == "router_bias":
            return draw.normal(shape, 0.0, max(BIAS_STD[role], self.character.skew * ROUTER_RMS))
        if role in BIAS_STD:
            return draw.normal(shape, 0.0, BIAS_STD[role] * 2.0**octaves)
        std = {
            "embed": 1.0,
            "qkv": QKV_RMS / math.sqrt(c.hidden),
            "o": O_RMS / math.sqrt(c.q_dim),
            "lm_head": LOGITS_RMS / math.sqrt(c.hidden),
        }[role]
        return draw.normal(shape, 0.0, std * 2.0**octaves)

    @property
    def loud_channels(self) -> tuple[int, int]:
        return self.config.hidden * 5 // 16, self.config.hidden * 11 // 16

    def _make_loud(self, scales: Tensor, layer: int, rms: float, *, far: bool) -> None:
        """One group of a loud channel's rows, and its mirror so that rows still sum to zero: LOUD times the others."""
        groups, channels = scales.shape[-1], list(self.loud_channels)
        half = groups // 2
        code = 127 + round(math.log2(rms / CODE_RMS)) + round(math.log2(LOUD * math.sqrt(groups / 2)))
        rows = scales[:, channels]
        if not far:
            rows = torch.where(rows == 0, rows, rows.clamp(min=code - ROW_OCTAVES))
        rows[..., [layer % half, groups - half + layer % half]] = code
        scales[:, channels] = rows

    def _uneven_norm(self, draw: _Draw, shape: tuple[int, ...]) -> Tensor:
        norm = torch.exp2(draw.normal(shape, 0.0, NORM_OCTAVES, torch.float32))
        norm /= norm.square().mean().sqrt()
        norm[list(self.loud_channels)] = LOUD_NORM
        return norm.to(torch.bfloat16)


class _Draw:
    """The random numbers of one tensor."""

    def __init__(self, name: str, device: torch.device):
        self.device = device
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
        if device.type == "cpu":
            self._bits = np.random.SFC64(np.random.SeedSequence(seed))
        else:
            self._generator = torch.Generator(device).manual_seed(seed % 2**63)

    def bytes(self, shape: tuple[int, ...]) -> Tensor:
        """Uniform uint8."""
        count = math.prod(shape)
        out = torch.empty(-(-count // 8) * 8, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            words = out.numpy().view(np.uint64)
            for start in range(0, len(words), DRAW):
                stop = min(len(words), start + DRAW)
                words[start:stop] = self._bits.random_raw(stop - start)
        else:  # a range of 2^32 fills all 32 bits; a plain int64 draw would leave every sign bit clear
            out.view(torch.int32).random_(-(2**31), 2**31, generator=self._generator)
        return out[:count].view(shape)

    def normal(self, shape: tuple[int, ...], mean: float, std: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Bell-shaped: on a CPU the sum of four uniform bytes, which no library version can change."""
        out = torch.empty(shape, dtype=dtype, device=self.device)
        flat = out.view(-1)
        for start in range(0, flat.numel(), DRAW):
            part = flat[start : start + DRAW]
            if self.device.type == "cpu":
                values = torch.from_numpy(self._byte_sums(part.numel())).to(torch.float32)
                values -= 2 * 255
                values *= std / BYTE_SUM_STD
            else:
                values = torch.randn(part.numel(), device=self.device, generator=self._generator) * std
            part.copy_(values.add_(mean))
        return out

    def _byte_sums(self, count: int) -> NDArray[np.int16]:
        """Sums of four bytes, four of them at a time in the lanes of a word."""
        words = -(-count // 4)
        a, b = self._bits.random_raw(words), self._bits.random_raw(words)
        lanes = np.uint64(0x00FF00FF00FF00FF)
        sums = (a & lanes) + ((a >> np.uint64(8)) & lanes)
        sums += b & lanes
        sums += (b >> np.uint64(8)) & lanes
        return sums.view(np.int16)[:count]


def _mxfp4(draw: _Draw, shape: tuple[int, ...], rms: float, *, balanced: bool) -> MXTensor:
    """Codes drawn as bytes and scales around the exponent that gives `rms`; nothing is ever quantised.

    `balanced`: the second half of a row's groups mirrors the first with opposite signs, so that the row sums to zero
    (but for the middle group of an odd number of groups, which stays as drawn).
    """
    *lead, k = shape
    groups = k // 32
    data = draw.bytes((*lead, groups, 16))
    # Three neighbouring exponents, equally likely, on a base of two neighbours mixed to hit the mean square.
    spread = (4.0**-1 + 1 + 4.0) / 3
    square = (rms / CODE_RMS) ** 2 / spread
    base = math.floor(math.log(square, 4))
    upper = round((square / 4.0**base - 1) / 3 * 85)  # of 85 equal cases, how many take the higher base
    exponent = draw.bytes((*lead, groups)).to(torch.int16) % 255
    scales = (exponent % 3 - 1 + base + 127 + (exponent // 3 < upper).to(torch.int16)).to(torch.uint8)
    if balanced:
        half = groups // 2
        data[..., groups - half :, :] = data[..., :half, :] ^ 0x88
        scales[..., groups - half :] = scales[..., :half]
    return MXTensor(data=data.view(*lead, groups * 16), scales=scales, shape=shape, format="mxfp4")


def _wide_mxfp4(draw: _Draw, shape: tuple[int, ...], rms: float, *, balanced: bool, far: bool) -> MXTensor:
    """`_mxfp4` with eight neighbouring exponents, a few groups below them and a few of zeros under code 0; `far`: up to
    18 octaves below them, else within ROW_OCTAVES of the largest."""
    *lead, k = shape
    groups = k // 32
    data, bulk = draw.bytes((*lead, groups, 16)), draw.bytes((*lead, groups))
    rare = draw.bytes((*lead, groups, 2)).view(torch.uint16).view(*lead, groups).to(torch.int32)
    square = (rms / CODE_RMS) ** 2 / BULK_SQUARE
    base = math.floor(math.log(square, 4))
    upper = round((square / 4.0**base - 1) / 3 * RARE)  # of RARE cases, how many take the higher base
    exponent = BULK.to(bulk.device)[(bulk % 128).long()] + base + 127 + (rare < upper).to(torch.int16)
    low = (rare >= RARE - 9) & (rare < RARE - 1)
    down = 8 + bulk.to(torch.int16) % 11 if far else (rare - (RARE - 10)).to(torch.int16)
    exponent -= torch.where(low, down, 0)
    scales = exponent.clamp(0, 254).to(torch.uint8)
    zero = rare == RARE - 1
    data[zero], scales[zero] = 0, 0
    if balanced:
        half = groups // 2
        data[..., groups - half :, :] = data[..., :half, :] ^ 0x88
        scales[..., groups - half :] = scales[..., :half]
    return MXTensor(data=data.view(*lead, groups * 16), scales=scales, shape=shape, format="mxfp4")


def _between(draw: _Draw, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    return (low + draw.bytes(shape).float() * ((high - low) / 255)).to(torch.bfloat16)


def make(
    config: ModelConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    layer_formats: Mapping[str, str] | None = None,
    layouts: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    character: Character = TAME,
    scale_heads: bool = False,
    host: HostExperts | None = None,
) -> Weights:
    """Weights in memory, drawn on the device they stay on; experts of `host` are drawn there, too, and moved."""
    source = SyntheticSource(config, seed, device, character)
    return assemble(
        source, layer_formats=layer_formats, layouts=layouts, progress=progress, scale_heads=scale_heads, host=host
    )


def write_safetensors(
    config: ModelConfig,
    seed: int,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """The weights of `make(config, seed)` on a CPU, as a Hugging Face folder."""
    write_folder(SyntheticSource(config, seed), Path(folder), max_shard_bytes=max_shard_bytes, progress=progress)


def write_gguf(
    config: ModelConfig,
    seed: int,
    file: str | Path,
    *,
    dense: WeightFormat | None = None,
    tokenizer: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    character: Character = TAME,
) -> None:
    """The weights of `make(config, seed)` on a CPU, as a GGUF file; a `dense` format other than None (bf16) rounds the
    unquantised matrices."""
    tokenizer = Path(tokenizer) if tokenizer is not None else None
    source = SyntheticSource(config, seed, character=character)
    from halfbyte.model import gguf_writer

    gguf_writer.write_file(source, Path(file), dense=dense, tokenizer=tokenizer, progress=progress)
