"""EAGLE-3: one small decoder layer that guesses from the target's own hidden states (Li et al.).

The head reads what public gpt-oss heads ship. For position i it takes the target's hidden states at a few layer
boundaries, joined by `fc`, and the embedding of token i + 1, and guesses token i + 2; further guesses feed on its
own output. Its attention is a plain Llama layer's: no sinks, no window, its own head counts. Boundary b is what
enters layer b; the number of layers is what leaves the last one, before the final norm.

Heads differ in what their config says (`head_config.py`) and in their tensors:
  input_norm.weight, fc_norm.N.weight   a norm over the joined states, or one over each of them
  no lm_head, no d2t                    the target's output layer and whole vocabulary
  no embed_tokens                       the target's embedding
  midlayer.* or layers.0.*              two names for the one layer

Its keys and values share the pages of the target's full kind: the same tables, prefix cache and preemption serve
both. (The last slot of a shared prefix was computed with another next token. That costs a guess at
worst.) Refuses heads of another hidden size, with more than one layer, with tensors it does not know, or whose tensors
have other shapes than their config asks for.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from halfbyte.engine.batch import Batch, Ints
from halfbyte.engine.runner import StepResult
from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.head_config import HeadConfig, read_config
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.errors import CheckpointError, PlanError
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.safetensors_io import read_header
from halfbyte.ops.norm import rms_norm
from halfbyte.ops.rope import rope, rope_table
from halfbyte.plan.activations import Activations
from halfbyte.plan.step import Step

if TYPE_CHECKING:
    from halfbyte.engine.sequence import Sequence

_LAYER = {
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight",
}  # fmt: skip
_NORMS = {"input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"}
_FC_NORM = re.compile(r"fc_norm\.\d\.weight")  # of each of the joined states
_OUTER = {"fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "input_norm.weight", "d2t", "t2d"}


class Eagle3Head:
    """The layer itself: no cache, no scheduling."""

    def __init__(self, folder: Path, target: GptOss) -> None:
        self.config = c = read_config(folder, target.config.layers, target.config.hidden)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} has no .safetensors file; is the download complete?")
        for f in files:
            read_header(f)  # refuses a file that is not safetensors before it is mapped
        raw = {name.removeprefix("model."): t for f in files for name, t in load_file(f).items()}
        layer, outer = {}, {}
        for name, tensor in raw.items():
            for prefix in ("midlayer.", "layers.0."):
                if name.startswith(prefix) and name.removeprefix(prefix) in _LAYER:
                    layer[name.removeprefix(prefix)] = tensor
                    break
            else:
                if name not in _OUTER and not _FC_NORM.fullmatch(name):
                    raise CheckpointError(f"{folder} holds {name!r}, which is not part of an EAGLE-3 head.")
                outer[name] = tensor
        needed = {n for n in _LAYER if n.endswith(".weight")} - {"input_layernorm.weight"}
        missing = sorted(needed - layer.keys()) + ([] if "norm.weight" in outer else ["norm.weight"])
        if c.boundaries and "fc.weight" not in outer:
            missing.append("fc.weight")
        if c.norm_before_fc and "input_norm.weight" not in outer:
            missing.append("input_norm.weight")
        fc_norms = [f"fc_norm.{i}.weight" for i in range(len(c.boundaries))] if c.fc_norm else []
        missing += [name for name in fc_norms if name not in outer]
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}; is the download complete?")
        unused = sorted(n for n in outer if _FC_NORM.fullmatch(n) and n not in fc_norms)
        unused += ["input_norm.weight"] * ("input_norm.weight" in outer and not c.norm_before_fc)
        if unused:
            raise CheckpointError(
                f"{folder} holds {', '.join(unused)}, but its config does not say what for (norm_before_fc, fc_norm)."
            )
        _check_shapes(folder, layer | outer, c, target.config.vocab)
        self.device = target.device
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.nbytes = sum(t.nbytes for n, t in raw.items() if n not in ("embed_tokens.weight", "d2t", "t2d"))

        def put(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, self.dtype)

        self._w = {n: put(t) for n, t in layer.items()}
        self._fc = put(outer["fc.weight"]) if c.boundaries else None
        self._input_norm = put(outer["input_norm.weight"]) if c.norm_before_fc else None
        self._fc_norms = [put(outer[name]) for name in fc_norms]
        self._norm = put(outer["norm.weight"])
        own = outer.get("embed_tokens.weight")
        self._embed = target.weights.embed if own is None else put(own)
        lm_head = outer.get("lm_head.weight")
        self._lm_head = put(target.weights.output_head()) if lm_head is None else put(lm_head)
        offsets = outer.get("d2t")
        self._ids = None if offsets is None else (torch.arange(offsets.shape[0]) + offsets.long()).to(self.device)
        if self._ids is None and self._lm_head.shape[0] != target.config.vocab:
            raise CheckpointError(f"{folder} has its own vocabulary of {self._lm_head.shape[0]} but no d2t to map it.")
        if self._ids is not None and not 0 <= int(self._ids.min()) <= int(self._ids.max()) < target.config.vocab:
            raise CheckpointError(f"{folder}: d2t names tokens past the model's vocabulary of {target.config.vocab}.")
        self._final = (target.weights.output_norm, target.config.norm_eps)

    def features(self, hidden: Tensor) -> Tensor:
        """Joined hidden states [R, n * H] -> [R, H]."""
        if self._fc is None:
            return rms_norm(hidden, *self._final).to(self.dtype)
        if self._input_norm is not None:
            hidden = rms_norm(hidden, self._input_norm, self.config.eps)
        if self._fc_norms:
            states = torch.chunk(hidden, len(self._fc_norms), dim=-1)
            hidden = torch.cat([rms_norm(s, w, self.config.eps) for s, w in zip(states, self._fc_norms)], dim=-1)
        return F.linear(hidden.to(self.dtype), self._fc)

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Input of attention [R, 2H]: the embedding of the next token, then the features."""
        w, eps = self._w, self.config.eps
        embedded = F.embedding(tokens.long(), self._embed).to(self.dtype)
        if "input_layernorm.weight" in w:
            embedded = rms_norm(embedded, w["input_layernorm.weight"], eps).to(self.dtype)
        return torch.cat((embedded, self._normed(hidden)), dim=-1)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[R, kv_heads, D] each."""
        c = self.config
        cos, sin = rope_table(*c.rope, positions)
        k = self._linear(x, "self_attn.k_proj").view(-1, c.kv_heads, c.head_dim)
        v = self._linear(x, "self_attn.v_proj").view(-1, c.kv_heads, c.head_dim)
        return rope(k, cos, sin).to(self.dtype), v

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        c = self.config
        q = self._linear(x, "self_attn.q_proj").view(-1, c.heads, c.head_dim)
        return rope(q, *rope_table(*c.rope, positions)).to(self.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One query [heads, D] over keys and values [L, kv_heads, D] -> [heads * D]."""
        c = self.config
        grouped = q.view(c.kv_heads, c.heads // c.kv_heads, c.head_dim).float()
        scores = torch.einsum("kgd,lkd->kgl", grouped, k.float()) * c.head_dim**-0.5
        return torch.einsum("kgl,lkd->kgd", scores.softmax(-1), v.float()).reshape(-1).to(self.dtype)

    def leave(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual stream [R, H] after attention and MLP, before the final norm."""
        w = self._w
        residual = self._normed(hidden) if self.config.norm_before_residual else hidden
        h = residual + self._linear(attended, "self_attn.o_proj")
        x = rms_norm(h, w["post_attention_layernorm.weight"], self.config.eps).to(self.dtype)
        return h + self._linear(
            F.silu(self._linear(x, "mlp.gate_proj")) * self._linear(x, "mlp.up_proj"), "mlp.down_proj"
        )

    def guess(self, hidden: Tensor) -> Tensor:
        """Target token ids [R]."""
        best = F.linear(rms_norm(hidden, self._norm, self.config.eps).to(self.dtype), self._lm_head).argmax(-1)
        return best if self._ids is None else self._ids[best]

    def carry(self, hidden: Tensor) -> Tensor:
        """What the next guess is made from, of what `leave` returned."""
        return rms_norm(hidden, self._norm, self.config.eps).to(self.dtype) if self.config.norm_output else hidden

    def _normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self._w["hidden_norm.weight"], self.config.eps).to(self.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w[f"{name}.weight"], self._w.get(f"{name}.bias"))


def _check_shapes(folder: Path, tensors: dict[str, Tensor], c: HeadConfig, vocab: int) -> None:
    h, joined = c.hidden, c.hidden * len(c.boundaries)
    rows = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    inner = tensors["mlp.gate_proj.weight"].shape[0]
    vocab_rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab
    embed_rows = tensors["embed_tokens.weight"].shape[0] if "embed_tokens.weight" in tensors else vocab
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{x}_proj.weight": (n, 2 * h) for x, n in rows.items()},
        **{f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()},
        "self_attn.o_proj.weight": (h, rows["q"]), "self_attn.o_proj.bias": (h,),
        "mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h), "mlp.down_proj.weight": (h, inner),
        **dict.fromkeys((*_NORMS, "norm.weight"), (h,)), "input_norm.weight": (joined,),
        "embed_tokens.weight": (max(vocab, embed_rows), h), "lm_head.weight": (vocab_rows, h), "d2t": (vocab_rows,),
    }  # fmt: skip
    if c.boundaries:
        shapes["fc.weight"] = h, joined
    for name, tensor in tensors.items():
        shape = (h,) if _FC_NORM.fullmatch(name) else shapes.get(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(f"{folder}: {name} is {list(tensor.shape)}, but its config asks for {list(shape)}.")


class HiddenTap:
    """Runs a step of the target and returns the hidden states at the boundaries that the head needs."""

    def __init__(self, target: GptOss, boundaries: tuple[int, ...]) -> None:
        self.target = target
        self.boundaries = boundaries or (target.config.layers,)
        self._one_piece = {
            regime: len(bound) == 1 and bound[0].phase.taps for regime, bound in target.plan.bound.items()
        }
        for regime, bound in target.plan.bound.items():
            if not self._one_piece[regime] and sum(b.phase.covers[-1] == "moe" for b in bound) != target.config.layers:
                raise PlanError(
                    f"EAGLE-3 reads hidden states between layers, but {bound[0].phase.name} ({regime}) runs them in "
                    f"one piece; use --enforce-eager or other kernels."
                )

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """(logits, joined hidden states [R, n * H])."""
        if self._one_piece[self.target.plan.regime(step)]:
            acts = self.target.plan.run(replace(step, taps=self.boundaries))
            return acts.logits, torch.cat(acts.taps.unbind(), dim=-1)
        acts = Activations()
        states: dict[int, Tensor] = {}
        layer = -1
        for b in self.target.plan.walk(step, acts):
            if layer < 0 and b.phase.covers[-1] == "embed":
                layer = 0
            elif b.phase.covers[-1] == "moe":
                layer += 1
            else:
                continue
            if layer in self.boundaries:
                states[layer] = acts.complete_x()
        return acts.logits, torch.cat([states[b] for b in self.boundaries], dim=-1)


class Eagle3Proposer:
    """`absorb` follows every step of the target, in the runner's thread; `propose` runs between steps."""

    def __init__(self, head: Eagle3Head, target: GptOss, controller: Controller, cost: float) -> None:
        self.head, self.controller, self._cost = head, controller, cost
        self.tap = HiddenTap(target, head.config.boundaries)
        self._page = target.spec.page_size
        self._pool: Tensor | None = None
        self._last: dict[int, tuple[int, Tensor]] = {}  # slot -> position of its last hidden state, and that state
        self._gaps: dict[int, int] = {}  # slot -> admission of the sequence there, if the head missed a step of it

    # ---- its part of the pages ----------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        c = self.head.config
        return 2 * self._page * c.kv_heads * c.head_dim * self.head.dtype.itemsize

    def allocate(self, pages: int) -> None:
        c = self.head.config
        shape = (pages, 2, self._page, c.kv_heads, c.head_dim)
        self._pool = torch.zeros(shape, dtype=self.head.dtype, device=self.head.device)

    def pool(self) -> Tensor:
        assert self._pool is not None, "allocate comes first"
        return self._pool

    def _store(self, page: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        assert self._pool is not None
        slot = positions.long() % self._page
        self._pool[page.long(), 0, slot] = k
        self._pool[page.long(), 1, slot] = v

    def _read(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, kv_heads, D] of one sequence."""
        assert self._pool is not None
        pages = self._pool[table[: -(-length // self._page)].long()]
        return pages[:, 0].flatten(0, 1)[:length], pages[:, 1].flatten(0, 1)[:length]

    # ---- following the target -----------------------------------------------------------------

    @property
    def suspended(self) -> bool:
        return self.controller.suspended

    def skip(self, batch: Batch) -> None:
        """A step ran without the head: its sequences lack keys and values, so none of them is guessed for again."""
        for chunk in batch.chunks:
            self._gaps[chunk.sequence.slot] = chunk.sequence.admission

    def _has_gap(self, seq: Sequence) -> bool:
        return self._gaps.get(seq.slot) == seq.admission

    def absorb(self, batch: Batch, tokens: Ints, hidden: Tensor, result: StepResult) -> None:
        """Store keys and values of every row, and the last hidden state of every sequence that has a next token."""
        head, device = self.head, self.head.device
        following = np.empty_like(tokens)
        following[:-1] = tokens[1:]
        starts = batch.query_start.tolist()
        for s, token in batch.following.items():
            following[starts[s + 1] - 1] = token
        following[batch.logit_rows] = result.tokens
        x = head.features(hidden)
        positions = torch.from_numpy(batch.positions).to(device)
        entered = head.enter(x, torch.from_numpy(following).to(device))
        full = torch.from_numpy(batch.full_table).to(device)
        rows = torch.from_numpy(batch.row_sequence).to(device).long()
        self._store(full[rows, positions.long() // self._page], positions, *head.keys_values(entered, positions))
        at = []
        for s, chunk in enumerate(batch.chunks):
            if not chunk.samples or self._has_gap(chunk.sequence):
                continue
            draft, row, right = chunk.draft, chunk.first_sampled, 0
            while right < len(draft) and result.tokens[row + right] == draft[right]:
                right += 1
            at.append((s, int(batch.logit_rows[row + right])))
        if not at:
            return
        picked = torch.tensor([r for _, r in at], device=device)
        q = head.queries(entered[picked], positions[picked])
        attended = torch.stack(
            [head.attend(q[i], *self._read(full[s], int(batch.positions[r]) + 1)) for i, (s, r) in enumerate(at)]
        )
        out = head.leave(x[picked], attended)
        for i, (s, r) in enumerate(at):
            self._last[batch.slots[s]] = (int(batch.positions[r]), out[i])

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        head, device = self.head, self.head.device
        proposals = [Proposal([]) for _ in wants]
        live, states, caches = [], [], {}
        for i, (seq, most) in enumerate(wants):
            position, state = self._last.get(seq.slot, (-1, None))
            if state is not None and position + 2 == len(seq.tokens) and not self._has_gap(seq):
                live.append((i, most, position))
                states.append(state)
                caches[i] = self._read(torch.tensor(seq.tables.full, device=device), position + 1)
        with torch.inference_mode():
            while live:
                h = torch.stack(states)
                tokens = head.guess(h)
                for (i, _, _), token in zip(live, tokens.tolist()):
                    proposals[i].tokens.append(token)
                on = [j for j, (i, most, _) in enumerate(live) if len(proposals[i].tokens) < most]
                if not on:
                    break
                live = [(live[j][0], live[j][1], live[j][2] + 1) for j in on]
                positions = torch.tensor([p for _, _, p in live], dtype=torch.int32, device=device)
                h = head.carry(h[on])
                entered = head.enter(h, tokens[on])
                k, v = head.keys_values(entered, positions)
                q = head.queries(entered, positions)
                attended = []
                for j, (i, _, _) in enumerate(live):
                    keys, values = caches[i]
                    caches[i] = torch.cat((keys, k[j : j + 1])), torch.cat((values, v[j : j + 1]))
                    attended.append(head.attend(q[j], *caches[i]))
                states = list(head.leave(h, torch.stack(attended)))
        for proposal in proposals:
            proposal.cost = self._cost * len(proposal.tokens) / max(1, len(wants))
        return proposals

    def observe(self, seq: Sequence, new: int) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        self._last.pop(seq.slot, None)

    def pace(self, seq: Sequence) -> Pace:
        return self.controller.pace()
