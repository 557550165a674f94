"""vLLM's gpt-oss with our layers, and the attention backend that passes vLLM's pages and tables to them.

Only vLLM imports this module, when it builds the model. With `compat.py` and `compat_engine.py` it holds every use of
vLLM's interfaces. If single operations were chosen (`layers.choose`), the model is vLLM's own and runs unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from halfbyte.ops.rope import yarn_frequencies
from halfbyte.plan.plan import Compilation
from halfbyte.vllm_plugin import compat
from halfbyte.vllm_plugin.inside import Inside
from halfbyte.vllm_plugin.layers import PAGE, LayerModel, VllmBatch, idle_step, kind_of, layers_of, step_of

NAME = "HALFBYTE"


# ---- pages and tables ------------------------------------------------------------------------------------------------


@dataclass
class HalfbyteMetadata(AttentionMetadata):  # type: ignore[misc]
    batch: VllmBatch


class HalfbyteBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Passes vLLM's description of a step on unchanged."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # sequences with one row stand in front

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> HalfbyteMetadata:
        common = common_attn_metadata
        return HalfbyteMetadata(
            VllmBatch(
                common.block_table_tensor,
                common.query_start_loc,
                common.query_start_loc_cpu,
                common.seq_lens,
                common.num_actual_tokens,
                common.max_query_len,
                common.max_seq_len,
            )
        )


class HalfbyteAttention(AttentionImpl):  # type: ignore[misc]
    """A placeholder for vLLM, which requires an implementation. The model's own attention layers never run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kv_cache_dtype = "auto"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("attention is a part of our layers")


class HalfbyteBackend(AttentionBackend):  # type: ignore[misc]
    """Makes vLLM's blocks our pages: 64 tokens, the keys of all heads, then the values, head by head."""

    accept_output_buffer = True
    supported_dtypes = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type:
        return HalfbyteAttention

    @staticmethod
    def get_builder_cls() -> type:
        return HalfbyteBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[int]:
        return [PAGE]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError("pages of several layers are not one tensor here")
        return (0, 1, 2, 3, 4)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


# ---- the model -------------------------------------------------------------------------------------------------------


class UntouchedLinear(UnquantizedLinearMethod):  # type: ignore[misc]
    """The router's method: it keeps the weight, which vLLM on a CPU would repack and free."""

    def process_weights_after_loading(self, layer: Any) -> None:
        return None


class HalfbyteGptOss(GptOssForCausalLM):  # type: ignore[misc]
    """gpt-oss as vLLM builds and loads it. If our layers were chosen, a step runs by our plan."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._layer_model: LayerModel | None = None
        self._lie: list[tuple[int, int]] = []  # address and size of every layer's pages in this step; none: idle
        self._views: list[Tensor] = []
        self._inside: Inside | None = None
        self._folds: Inside | None = None
        if not isinstance(vllm_config.quant_config, compat.config_class()):
            return
        self._folds = here = compat.inside()
        self._drafts = vllm_config.speculative_config is not None
        if not here.layers_are_ours:
            return
        self._inside = here
        self._longest = vllm_config.model_config.max_model_len
        self._attention = [layer.attn.attn for layer in self.model.layers]
        for layer in self.model.layers:
            layer.mlp.router.quant_method = UntouchedLinear()
        for attention in self._attention:
            attention.attn_backend, attention.impl = HalfbyteBackend, HalfbyteAttention()
        self._compiled = Compilation(here.spec, here.chosen, here.arch) if here.arch.is_gpu else None

    def load_weights(self, weights: Any) -> Any:
        loaded = super().load_weights(weights)
        if self._folds is not None:
            self._fold(self._folds)
        if compat.is_early_cpu():
            for layer in self.model.layers:
                layer.attn.attn.impl.sinks = layer.attn.sinks.data.to(torch.bfloat16)  # as the checkpoint has them
        return loaded

    def _fold(self, here: Inside) -> None:
        """Norms move into the matrices that are about to be quantised. A drafting model may borrow the head and read
        hidden states behind the last norm, so that those stay as they are where there is one."""
        for i, layer in enumerate(self.model.layers):
            if hasattr(layer, "input_layernorm"):  # else the layer is another rank's
                here.fold("qkv", i, layer.input_layernorm.weight.data)
        if not self._drafts and hasattr(self.model.norm, "weight"):
            here.fold("lm_head", None, self.model.norm.weight.data)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Any:
        if self._inside is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        assert input_ids is not None, "our layers begin with tokens"
        assert inputs_embeds is None, "our layers begin with tokens"
        model = self._layer_model or self._bind(self._inside)
        metadata = get_forward_context().attn_metadata
        self._find_pages(paged=bool(metadata))
        if not metadata:
            return model.run(idle_step(model, input_ids.shape[0], self._longest))
        names = [attention.layer_name for attention in self._attention[:2]]
        batches = {kind_of(i): metadata[name].batch for i, name in enumerate(names)}
        return model.run(step_of(model, input_ids, positions, batches))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        if self._layer_model is None:
            logits: Tensor = super().compute_logits(hidden_states)
            return logits
        return self._layer_model.logits(hidden_states)[:, : self.config.vocab_size]

    def _bind(self, here: Inside) -> LayerModel:
        """Bind our layers after loading: `Inside.take` has the matrices, the vectors are read from vLLM's layers."""
        if self._compiled is not None:
            self._compiled.wait()
        for i, layer in enumerate(self.model.layers):
            here.weights[i] |= {
                "attn_norm": layer.input_layernorm.weight.data,
                "mlp_norm": layer.post_attention_layernorm.weight.data,
                "router": layer.mlp.router.weight.data,
                "router_bias": layer.mlp.router.bias.data,
                "sinks": layer.attn.sinks.data,
            }
        here.weights[None] |= {"embed": self.model.embedding.weight.data, "final_norm": self.model.norm.weight.data}
        weights = layers_of(here.weights, len(self.model.layers))
        self._idle = torch.zeros(
            (1, 1, 2, here.spec.kv_heads, PAGE, here.spec.head_dim), dtype=self._dtype, device=weights.embed.device
        )
        self._layer_model = LayerModel(
            here.choice, here.gates, here.arch, weights, rope_of(self.config), self._pages, here.record, here.into
        )
        return self._layer_model

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._attention[0].kv_cache_torch_dtype
        return dtype

    def _find_pages(self, *, paged: bool) -> None:
        """Locate the pages of this step: vLLM may replace them by others at another address or of another size."""
        caches = [_tensor(attention.kv_cache) for attention in self._attention] if paged else []
        lie = [(cache.data_ptr(), cache.numel()) for cache in caches]
        if lie != self._lie:
            form = self._idle.shape[1:]
            self._lie, self._views = lie, [cache.view(-1, *form) for cache in caches]

    def _pages(self, layer: int) -> Tensor:
        """The pages of a layer, as vLLM holds them; one idle page for a step without pages."""
        return self._views[layer] if self._views else self._idle


def _tensor(cache: Any) -> Tensor:
    """The tensor of a KV cache, which some versions wrap in a list."""
    tensor: Tensor = cache[0] if isinstance(cache, list) else cache
    assert tensor.is_contiguous(), f"vLLM's pages lie {tensor.stride()}"
    return tensor


def rope_of(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies and temperature, as vLLM's own gpt-oss takes them from the config."""
    rope = getattr(config, "rope_parameters", None) or config.rope_scaling
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    original = rope.get("original_max_position_embeddings", 4096)
    return yarn_frequencies(
        config.head_dim,
        theta,
        rope["factor"],
        original,
        rope["beta_fast"],
        rope["beta_slow"],
        rope.get("truncate", True),
    )
