"""vLLM's gpt-oss with our layers in it, and the attention backend that hands them vLLM's pages and tables.

vLLM imports this when it builds the model, and nobody else does; with `compat.py` and `compat_engine.py` it is all of
vLLM's that we touch. Where the choice is single operations (`layers.choose`), the model is vLLM's own and runs as it
would without us.
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
from halfbyte.plan.compilation import Compilation
from halfbyte.vllm_plugin import compat
from halfbyte.vllm_plugin.inside import Inside
from halfbyte.vllm_plugin.layers import PAGE, Batch, LayerModel, idle_step, kind_of, layers_of, step_of

NAME = "HALFBYTE"


# ---- pages and tables ------------------------------------------------------------------------------------------------


@dataclass
class HalfbyteMetadata(AttentionMetadata):  # type: ignore[misc]
    batch: Batch


class HalfbyteBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Hands on what vLLM says about a step; nothing is computed."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # sequences with one row stand in front

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> HalfbyteMetadata:
        said = common_attn_metadata
        return HalfbyteMetadata(
            Batch(
                said.block_table_tensor, said.query_start_loc, said.query_start_loc_cpu, said.seq_lens,
                said.num_actual_tokens, said.max_query_len, said.max_seq_len,
            )
        )  # fmt: skip


class HalfbyteAttention(AttentionImpl):  # type: ignore[misc]
    """Stands where vLLM looks for an implementation: the model's own layers are not run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kv_cache_dtype = "auto"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("attention is a part of our layers")


class HalfbyteBackend(AttentionBackend):  # type: ignore[misc]
    """A block of vLLM's is a page of ours: 64 tokens, keys of all heads, then values, each head's by themselves."""

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
    """The router's: a CPU would pack its weight for products of its own and give it back."""

    def process_weights_after_loading(self, layer: Any) -> None:
        return None


class HalfbyteGptOss(GptOssForCausalLM):  # type: ignore[misc]
    """vLLM builds and loads it as its own; a step then runs by our plan, if our layers were chosen."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._ours: LayerModel | None = None
        self._lie: list[tuple[int, int]] = []  # address and size of every layer's pages in this step; none: idle
        self._views: list[Tensor] = []
        self._inside: Inside | None = None
        if not isinstance(vllm_config.quant_config, compat.config_class()):
            return
        here = compat.inside()
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
        if compat.is_early_cpu():
            for layer in self.model.layers:
                layer.attn.attn.impl.sinks = layer.attn.sinks.data.to(torch.bfloat16)  # as the checkpoint has them
        return loaded

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        if self._inside is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        assert input_ids is not None, "our layers begin with tokens"
        assert inputs_embeds is None, "our layers begin with tokens"
        ours = self._ours or self._bind(self._inside)
        said = get_forward_context().attn_metadata
        self._find_pages(paged=bool(said))
        if not said:
            return ours.run(idle_step(ours, input_ids.shape[0], self._longest))
        names = [attention.layer_name for attention in self._attention[:2]]
        batches = {kind_of(i): said[name].batch for i, name in enumerate(names)}
        return ours.run(step_of(ours, input_ids, positions, batches))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        if self._ours is None:
            logits: Tensor = super().compute_logits(hidden_states)
            return logits
        return self._ours.logits(hidden_states)[:, : self.config.vocab_size]

    def _bind(self, here: Inside) -> LayerModel:
        """Once the weights are there: vLLM has handed in the matrices (`Inside.take`), vectors are still its own."""
        if self._compiled is not None:
            self._compiled.wait()
        for i, layer in enumerate(self.model.layers):
            here.held[i] |= {
                "attn_norm": layer.input_layernorm.weight.data, "mlp_norm": layer.post_attention_layernorm.weight.data,
                "router": layer.mlp.router.weight.data, "router_bias": layer.mlp.router.bias.data,
                "sinks": layer.attn.sinks.data,
            }  # fmt: skip
        here.held[None] |= {"embed": self.model.embedding.weight.data, "final_norm": self.model.norm.weight.data}
        weights = layers_of(here.held, len(self.model.layers))
        self._idle = torch.zeros(
            (1, 1, 2, here.spec.kv_heads, PAGE, here.spec.head_dim), dtype=self._dtype, device=weights.embed.device
        )
        self._ours = LayerModel(
            here.choice, here.gates, here.arch, weights, rope_of(self.config), self._pages, here.record, here.into
        )
        return self._ours

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._attention[0].kv_cache_torch_dtype
        return dtype

    def _find_pages(self, *, paged: bool) -> None:
        """Where they lie in this step: vLLM may give them up and make others, in other places or of another size."""
        caches = [_tensor(attention.kv_cache) for attention in self._attention] if paged else []
        lie = [(cache.data_ptr(), cache.numel()) for cache in caches]
        if lie != self._lie:
            form = self._idle.shape[1:]
            self._lie, self._views = lie, [cache.view(-1, *form) for cache in caches]

    def _pages(self, layer: int) -> Tensor:
        """A layer's, as vLLM holds them; one idle page where a step has none."""
        return self._views[layer] if self._views else self._idle


def _tensor(cache: Any) -> Tensor:
    """Some versions keep a list with one."""
    found: Tensor = cache[0] if isinstance(cache, list) else cache
    assert found.is_contiguous(), f"vLLM's pages lie {found.stride()}"
    return found


def rope_of(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies and temperature, as vLLM's own gpt-oss takes them from the config."""
    said = getattr(config, "rope_parameters", None) or config.rope_scaling
    theta = said.get("rope_theta", getattr(config, "rope_theta", None))
    original = said.get("original_max_position_embeddings", 4096)
    return yarn_frequencies(
        config.head_dim, theta, said["factor"], original, said["beta_fast"], said["beta_slow"],
        said.get("truncate", True),
    )  # fmt: skip
