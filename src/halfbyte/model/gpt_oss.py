"""gpt-oss: the network, as a specification.

    x = embed(tokens)
    for each layer, sliding and full attention in turn:
        h = rms_norm(x)                                   attn_norm
        q, k, v = h @ qkv + bias                          qkv
        q, k = rope(q), rope(k)                           rope      (yarn)
        cache[position] = k, v                            kv_write
        a = attention(q, cache)                           attention (causal, window on sliding layers, one sink a head)
        x = x + a @ o + bias                              o
        h = rms_norm(x)                                   mlp_norm
        experts, weights = top_k(h @ router + bias)       router    (softmax over the chosen)
        x = x + sum weights * expert(h)                   moe       (gate_up, clamped swiglu, down, biases)
    logits = rms_norm(x) @ lm_head                        final_norm, lm_head   (rows asked for, only)

What each line means is in `halfbyte.ops`; which kernel runs it is in the plan. This file joins the two: it turns a
configuration and gates into a Spec, selects a plan, binds it to weights and runs steps. It holds no kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import NotEnoughMemoryError, PlanError
from halfbyte.formats import FORMATS
from halfbyte.formats.matrices import Formats
from halfbyte.gates import Gates, check_layer_names, format_of_layer, layers_on
from halfbyte.model.checkpoint import lay_out
from halfbyte.model.config import PAGE_SIZE, ModelConfig
from halfbyte.model.weights import Weights, format_of
from halfbyte.ops.attention import STORE_DTYPES
from halfbyte.ops.rope import yarn_frequencies
from halfbyte.ops.sampling import best_of
from halfbyte.plan.alternatives import alternatives
from halfbyte.plan.machine import arch_of_gpu
from halfbyte.plan.phase import ARCHES, GROUP, Arch, Binding, Spec
from halfbyte.plan.plan import Plan, bind
from halfbyte.plan.select import PlanChoice, select, values_of
from halfbyte.plan.step import RegimeLimits, Step

log = logging.getLogger("halfbyte")

SINKS_OFF = (
    "SINKS ARE OFF: every answer of this run is wrong by design. gpt-oss was trained with attention sinks; "
    "--sinks off exists only to test that dropping them is noticed."
)
CHECKPOINT_FORMATS = {
    "qkv": "bf16",
    "o": "bf16",
    "gate_up": "mxfp4",
    "down": "mxfp4",
    "lm_head": "bf16",
    "embed": "bf16",
}


LAYER_MATRICES = ("qkv", "o", "gate_up", "down")  # matrices that every layer has


def arch_of(device: torch.device | str) -> Arch:
    device = torch.device(device)
    if device.type == "cpu":
        return ARCHES["cpu"]
    if device.type != "cuda":
        raise PlanError(f"halfbyte runs on cpu and cuda devices, not on {device.type!r}.")
    return arch_of_gpu(torch.cuda.get_device_capability(device))


def resolved(gates: Gates, stored: Mapping[str, str], arch: Arch | None) -> Gates:
    """Gates with the formats that `auto` means for dense layers stored in these; without a machine, as on a CPU."""
    return replace(
        gates, layers=layers_on(gates, gpu=arch is not None and arch.is_gpu, stored=Formats(stored).coarsest())
    )


def formats_after(
    config: ModelConfig, gates: Gates, stored: Mapping[str, str] = CHECKPOINT_FORMATS, arch: Arch | None = None
) -> Formats:
    """The format of every matrix once --layers is applied to weights found in these formats, on a machine of this
    architecture.

    A block-scaled token embedding becomes float32 on a CPU, which is exact, and bf16 on a GPU, as its kernels read it.
    """
    on_gpu = arch is not None and arch.is_gpu
    gates = resolved(gates, stored, arch)
    targets = gates.layer_formats
    if on_gpu and gates.layers.moe == "auto":
        targets["moe"] = "mxfp4"
    check_layer_names(targets, config.layers)
    before = Formats(stored)
    after: dict[str, list[str]] = {}
    for role in before:
        places = list(enumerate(config.layer_kinds)) if role in LAYER_MATRICES else [(None, None)]
        named = [format_of_layer(targets, GROUP.get(role, ""), layer, kind) for layer, kind in places]
        after[role] = [before.of(role, i) if form == "checkpoint" else form for (i, _), form in zip(places, named)]
    if after.get("embed", [""])[0] in FORMATS:
        after["embed"] = ["f32" if arch is not None and not on_gpu else "bf16"]
    return Formats({}, after)


def spec_of(
    config: ModelConfig,
    gates: Gates,
    arch: Arch,
    formats: Mapping[str, str],
    page_size: int = PAGE_SIZE,
    *,
    reference: bool = False,
) -> Spec:
    """Where the `reference` runs on a CPU, `auto` rounds nothing."""
    attention = {"window"}
    if config.heads != config.kv_heads:
        attention.add("gqa")
    if gates.sinks != "off":
        attention.add("sinks")
    if any((kind == "sliding") != (i % 2 == 0) for i, kind in enumerate(config.layer_kinds)):
        attention.add("uneven_layers")  # kinds that do not alternate, sliding first
    values = values_of(gates, arch, reference=reference)
    return Spec(
        layers=config.layers,
        hidden=config.hidden,
        intermediate=config.intermediate,
        experts=config.experts,
        top_k=config.top_k,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        window=config.window,
        max_context=config.max_context,
        norm_eps=config.norm_eps,
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
        formats=Formats(formats).only(CHECKPOINT_FORMATS),
        wide=frozenset(r for r in formats if r not in CHECKPOINT_FORMATS and formats[r] != "bf16"),
        features={
            "qkv": frozenset({"bias"}),
            "o": frozenset({"bias"}),
            "rope": frozenset(() if config.yarn.is_plain else {"yarn"}),
            "attention": frozenset(attention),
            "router": frozenset({"bias"}),
            "moe": frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"}),
        },
        dtype=values.dtype,
        activation=values.activation,
        activations=values.activations,
        kv_dtype=values.kv_dtype,
        page_size=page_size,
        tile=gates.tile,
        host_layers=host_layers(config, gates, arch),
        host_activation="f32" if gates.activation in ("float", "f32") else "int8",
    )


def host_layers(config: ModelConfig, gates: Gates, arch: Arch) -> int:
    """The number of layers whose experts --experts-in-host keeps in host memory. `auto` is resolved by the account of
    memory (`engine/placement.py`) before a plan is made, and means none here."""
    text = gates.experts_in_host
    if text == "auto" or not int(config.layers if text == "all" else text):
        return 0
    if not arch.is_gpu:
        raise PlanError("--experts-in-host has no effect on a CPU, where every weight is in host memory; leave it out.")
    count = config.layers if text == "all" else int(text)
    if count > config.layers:
        raise PlanError(f"--experts-in-host is {count}, but the model has {config.layers} layers; give at most that.")
    return count


def choose(
    config: ModelConfig,
    gates: Gates,
    arch: Arch,
    formats: Mapping[str, str] = CHECKPOINT_FORMATS,
    page_size: int = PAGE_SIZE,
) -> PlanChoice:
    """Spec, phases and reasons for a model whose weights are found in these formats; needs no GPU and no weights.

    A failure ends with the flag that would work, which was tried."""
    try:
        return _choose(config, gates, arch, formats, page_size)
    except PlanError as e:

        def works(other: Gates) -> bool:
            try:
                _choose(config, other, arch, formats, page_size)
            except PlanError:
                return False
            return True

        near = alternatives(resolved(gates, formats, arch), formats)
        hint = next((flags for flags, other in near if works(other)), None)
        raise PlanError(f"{e}\n{f'Use {hint}.' if hint else f'No flag makes it run on {arch.name}.'}") from None


def _choose(config: ModelConfig, gates: Gates, arch: Arch, stored: Mapping[str, str], page_size: int) -> PlanChoice:
    formats = formats_after(config, gates, stored, arch)
    spec = spec_of(config, gates, arch, formats, page_size)
    chosen, selection = select(spec, arch, gates)
    if not arch.is_gpu and any(phase.reference for phases in chosen.values() for phase in phases):
        spec = spec_of(config, gates, arch, formats, page_size, reference=True)
        chosen, selection = select(spec, arch, gates)
    return PlanChoice(spec, chosen, selection)


def page_bytes(config: ModelConfig, spec: Spec) -> int:
    """Bytes of one KV page: keys and values of all layers of one kind."""
    return config.layers_per_page * 2 * config.kv_dim * STORE_DTYPES[spec.kv_dtype].itemsize * spec.page_size


class GptOss:
    """A model ready to run steps: weights, a plan bound to them, and a KV pool once `allocate_kv` was called.

    Without a `choice` the plan is chosen here, and weights are converted to the layouts that it needs."""

    def __init__(
        self,
        weights: Weights,
        gates: Gates | None = None,
        *,
        page_size: int = PAGE_SIZE,
        choice: PlanChoice | None = None,
        limits: RegimeLimits | None = None,
    ) -> None:
        self.config = config = weights.config
        self.weights = weights
        self.gates = gates or Gates()
        self.device = weights.embed.device
        self.arch = arch_of(self.device)
        stored = weights.formats() | {"embed": format_of(weights.embed)}
        if choice is None:  # else the weights were laid out as the plan says when they were loaded
            self.gates = resolved(self.gates, stored, None)  # these weights stay in the formats that they have
            choice = choose(config, self.gates, self.arch, stored | weights.wide(), page_size)
            self.weights = weights = lay_out(weights, choice.selection.layouts)
        spec = choice.spec
        for role in spec.formats:
            if spec.matrices.text(role) != stored.text(role):
                raise PlanError(
                    f"the plan was made for {role} in {spec.matrices.text(role)}, but the weights hold it in "
                    f"{stored.text(role)}."
                )
        self.spec = spec
        if self.gates.sinks == "off":
            log.warning(SINKS_OFF)
        y = config.yarn
        self._rope = yarn_frequencies(
            config.head_dim, config.rope_theta, y.factor, y.original_context, y.beta_fast, y.beta_slow, y.truncate,
            y.attention_factor,
        )  # fmt: skip
        self._buffers: dict[str, Tensor] = {}
        self._state: dict[str, Any] = {}
        self._pool: Tensor | None = None
        self.plan: Plan = bind(choice.chosen, choice.selection, spec, self.arch, self.binding, limits)

    def binding(self, layer: int | None) -> Binding:
        """The binding of a phase: one layer of this model, or None for what lies outside of the layers."""
        return Binding(
            spec=self.spec,
            weights=self.weights if layer is None else self.weights.layers[layer],
            kind=None if layer is None else self.config.layer_kinds[layer],
            kind_index=0 if layer is None else self.config.kind_index(layer),
            rope=self._rope,
            kv_pool=self.kv_pool,
            buffers=self._buffers,
            layer=layer,
            gates=self.gates,
            state=self._state,
        )

    # ---- KV pool ------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        return page_bytes(self.config, self.spec)

    def allocate_kv(self, pages: int) -> Tensor:
        """The pool, page 0 included. Zeroed: a masked slot must hold a number."""
        c, s = self.config, self.spec
        shape = (pages, c.layers_per_page, 2, c.kv_heads, s.page_size, c.head_dim)
        try:
            if self.device.type == "cpu":  # NumPy's zeros take memory when they are first written, torch's at once
                size = pages * self.page_bytes
                self._pool = torch.from_numpy(np.zeros(size, np.uint8)).view(STORE_DTYPES[s.kv_dtype]).view(shape)
            else:
                self._pool = torch.zeros(shape, dtype=STORE_DTYPES[s.kv_dtype], device=self.device)
        except (RuntimeError, MemoryError, torch.cuda.OutOfMemoryError):
            gib = pages * self.page_bytes / 2**30
            raise NotEnoughMemoryError(
                f"{pages} KV pages ({gib:.2f} GiB) do not fit on {self.device}; ask for fewer."
            ) from None
        return self._pool

    def release_kv(self) -> None:
        """Gives the pool's memory back; steps need another `allocate_kv` first."""
        self._pool = None

    def kv_pool(self) -> Tensor:
        assert self._pool is not None, "allocate_kv comes before the first step"
        return self._pool

    # ---- running ------------------------------------------------------------------------------

    def forward(self, step: Step) -> Tensor:
        """Logits float32 [L, vocab] of the requested rows."""
        return self.plan.run(step).logits

    def best(self, step: Step) -> tuple[Tensor, Tensor]:
        """(token of the highest logit, that logit) of the rows asked for; -1 where a logit is NaN. The others are not
        even written, where a phase can do without."""
        acts = self.plan.run(replace(step, best_only=True))
        if acts.has("best"):
            return acts.best, acts.best_logit
        return best_of(acts.logits)
