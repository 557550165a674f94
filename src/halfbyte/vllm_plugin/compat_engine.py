"""vLLM's engine behind our server: requests in, tokens out, and our grammar masks over its logits.

With `compat.py` and `compat_model.py`, this file holds every use of vLLM's interfaces. It does not decide which tokens
a mask allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.vllm_plugin.compat import version

EXTRA = "halfbyte"  # our part of a request's extra arguments, which vLLM hands to every process


@dataclass(frozen=True)
class Gained:
    """The result of one vLLM step for one choice of one request."""

    id: str
    index: int
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None  # of each token, itself first
    finish: str | None  # vLLM's finish reason
    cached: int | None  # prompt tokens that came from the prefix cache


@dataclass(frozen=True)
class Load:
    """The present load of vLLM's scheduler."""

    running: int
    waiting: int
    pages: int
    pages_used: int


class VllmEngine:
    """vLLM's own engine in this process: requests in, tokens out, one step at a time."""

    def __init__(self, model: str, arguments: Sequence[str], processor: str | None = None) -> None:
        """`processor`: the logits processor for vLLM's processes (`processor_class`), as module:name."""
        version()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        try:
            parsed = parser.parse_args(["--model", model, *arguments, "--skip-tokenizer-init"])
        except SystemExit:
            raise PlanError(f"vLLM rejected {' '.join(arguments)}; see its message above.") from None
        engine_arguments = EngineArgs.from_cli_args(parsed)
        # With a drafting model a row is a drafted token, which the processor does not follow.
        self.masks = processor is not None and not engine_arguments.speculative_config
        if self.masks:
            engine_arguments.logits_processors = [*(engine_arguments.logits_processors or ()), processor]
        # The defaults of `vllm serve`, which the other nodes of a launch run: a step of theirs has as many tokens.
        self.engine = LLMEngine.from_engine_args(engine_arguments, UsageContext.OPENAI_API_SERVER)
        config = self.engine.vllm_config
        self.max_context: int = config.model_config.max_model_len
        self.vocab: int = config.model_config.get_vocab_size()
        self.ranks: int = config.parallel_config.world_size
        self.max_seqs: int = config.scheduler_config.max_num_seqs
        eos = getattr(config.model_config.hf_config, "eos_token_id", None)
        self.eos: tuple[int, ...] = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)

    @property
    def has_work(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def add(self, id: str, prompt: list[int], *, extra: Mapping[str, Any] | None = None, **sampling: Any) -> None:
        """Add a request. `extra` is passed to our logits processor."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra_args = None if extra is None else {EXTRA: dict(extra)}
        params = SamplingParams(
            **sampling, detokenize=False, output_kind=RequestOutputKind.DELTA, extra_args=extra_args
        )
        self.engine.add_request(id, {"prompt_token_ids": prompt}, params)

    def abort(self, id: str) -> None:
        self.engine.abort_request([id])

    def step(self) -> list[Gained]:
        gained = []
        for output in self.engine.step():
            for choice in output.outputs:
                logprobs = (
                    None
                    if choice.logprobs is None
                    else [_logprobs(*pair) for pair in zip(choice.token_ids, choice.logprobs)]
                )
                gained.append(
                    Gained(
                        output.request_id,
                        choice.index,
                        list(choice.token_ids),
                        logprobs,
                        choice.finish_reason,
                        output.num_cached_tokens,
                    )
                )
        return gained

    def load(self) -> Load:
        scheduler = self.engine.engine_core.engine_core.scheduler
        running, waiting = scheduler.get_request_counts()
        pages = int(self.engine.vllm_config.cache_config.num_gpu_blocks or 0)
        return Load(running, waiting, pages, round(scheduler.kv_cache_manager.usage * pages))

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def _logprobs(token: int, by_token: Any) -> list[tuple[int, float]]:
    """Logprobs of the chosen token first, then of the others by rank."""
    ranked = sorted(by_token.items(), key=lambda item: item[1].rank or 0)
    others = [(t, float(entry.logprob)) for t, entry in ranked]
    return [(token, float(by_token[token].logprob)), *others]


# ---- masks -----------------------------------------------------------------------------------------------------------


class Follower(Protocol):
    """Follows one choice of a request. It must not raise: an exception in a processor ends vLLM's engine."""

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.int32] | None:
        """One bit for each token that may follow the generated tokens; None allows all of them."""


class Followers(Protocol):
    """Creates the followers of one sampling process."""

    def __init__(self, model: str) -> None: ...

    def follow(self, extra: Mapping[str, Any], prompt: Sequence[int]) -> Follower: ...


def processor_class(followers: type[Followers]) -> type:
    """A logits processor class for vLLM.

    vLLM's two model runners have different interfaces: the first reports which rows move, the second assigns requests
    a slot and passes the rows of every step. Newer versions have both, so one class implements both."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor
    except ImportError:
        bases: tuple[Any, ...] = (LogitsProcessor,)
    else:
        bases = (LogitsProcessor, SlotProcessor)

    class HalfbyteMasks(*bases):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device_or_slots: Any, is_pin_memory: bool | None = None) -> None:
            self._followers = followers(vllm_config.model_config.model)
            self._rows: dict[int, tuple[Follower, list[int]]] = {}  # with the generated tokens, in vLLM's own list
            self._slots: dict[int, Mapping[str, Any] | Follower] = {}  # `extra` until the prompt is there
            self._state = device_or_slots

        def is_argmax_invariant(self) -> bool:
            return False

        # ---- the first runner

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            rows = self._rows
            for index in batch_update.removed:
                rows.pop(index, None)
            for index, params, prompt, generated in batch_update.added:
                rows.pop(index, None)
                if extra := (params.extra_args or {}).get(EXTRA):
                    rows[index] = self._followers.follow(extra, prompt or ()), generated
            for first, second, direction in batch_update.moved:
                mine, other = rows.pop(first, None), rows.pop(second, None)
                if mine is not None:
                    rows[second] = mine
                if other is not None and direction is MoveDirectionality.SWAP:
                    rows[first] = other

        # ---- the second runner

        def add_request(self, slot: int, params: Any) -> bool:
            self._slots.pop(slot, None)
            if extra := (params.extra_args or {}).get(EXTRA):
                self._slots[slot] = extra
            return slot in self._slots

        def _slot_rows(self, context: Any) -> dict[int, tuple[Follower, list[int]]]:
            rows = {}
            for row, slot in enumerate(context.idx_mapping_np.tolist()):
                entry = self._slots.get(slot)
                if entry is None:
                    continue
                length = int(context.seq_lens_upper_bound_np[row])  # of nothing drafted: exact
                prompt = int(self._state.prompt_len.np[slot])
                if length < prompt:
                    continue  # a part of its prompt: nothing is drawn
                tokens = self._state.all_token_ids.gpu[slot, :length].tolist()
                if isinstance(entry, Mapping):
                    entry = self._slots[slot] = self._followers.follow(entry, tokens[:prompt])
                rows[row] = entry, tokens[prompt:]
            return rows

        # ---- both

        def apply(self, logits: Tensor, context: Any = None) -> Tensor:
            for index, (follower, generated) in (self._rows if context is None else self._slot_rows(context)).items():
                bits = follower.allowed(generated)
                if bits is not None:
                    logits[index].masked_fill_(~unpacked(bits, logits.shape[1]).to(logits.device), -torch.inf)
            return logits

    return HalfbyteMasks


def unpacked(bits: NDArray[np.int32], width: int) -> Tensor:
    """One bool for each token. Tokens beyond the bits are not allowed."""
    mask = np.zeros(width, np.bool_)
    bools = np.unpackbits(bits.view(np.uint8), bitorder="little")[:width]
    mask[: bools.size] = bools
    return torch.from_numpy(mask)
