"""The EAGLE-3 head of the embedded model: train it on the target's own greedy outputs, count acceptance, export it.

One Llama layer over [embedding of the next token; fused hidden states of three target layers], no sinks, no window, its
own small vocabulary. Three draft steps are unrolled in training, each feeding on the one before ("training-time test",
Li et al., EAGLE-3): step j of a root sees the target-fed keys up to the root and the keys of its own steps 1..j.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import data
import second_edition
import torch
import torch.nn.functional as F
from network import GptOss, Packed, RMSNorm, dense_masks, rotate
from optimizer import Optimizer
from phrasings import Split
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfbyte.evals.problem import Problem
from halfbyte.evals.tasks import MIXTURE, TASKS, group, problem
from halfbyte.harmony.render import render_prompt

LAYERS = (2, 4, 7)  # the head sees what enters these layers
STEPS = 3
DRAFT_VOCAB = 1024
THETA = 150000.0
LENGTH = 1024  # of a packed row; longer conversations are left out
PART = 1024  # outputs made at once; with a time limit, made until OWN_SHARE of it is over
OWN_SHARE = 0.4
CONVERSATIONS = 0.8  # share of the second edition's documents that are conversations, as in its training
BRANCHES = 3  # prompts of one conversation: they share most of their text
NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "down_proj": "mlp.down_proj",
}  # fmt: skip
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


class Head(nn.Module):
    """Parameter names follow the public checkpoints as far as the optimizer's naming allows; `tensors` renames."""

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, eps: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        H, Q, KV = hidden, heads * head_dim, kv_heads * head_dim

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) / math.sqrt(columns))

        self.fc = matrix(H, 3 * H)
        self.q, self.k, self.v, self.o = matrix(Q, 2 * H), matrix(KV, 2 * H), matrix(KV, 2 * H), matrix(H, Q)
        self.gate_proj, self.up_proj, self.down_proj = (
            matrix(intermediate, H),
            matrix(intermediate, H),
            matrix(H, intermediate),
        )
        self.hidden_norm, self.input_layernorm = RMSNorm(H, eps), RMSNorm(H, eps)
        self.post_attention_layernorm, self.norm = RMSNorm(H, eps), RMSNorm(H, eps)
        self.lm_head = nn.Parameter(torch.randn(vocab, H) * 0.02)
        self.register_buffer("inverse", THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim), persistent=False)

    def project(self, embedded: Tensor, h: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, S, _ = h.shape
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(h)), dim=-1)
        angle = position.float()[:, None, :, None] * self.inverse
        cos, sin = angle.cos(), angle.sin()

        def heads(w: Tensor, n: int) -> Tensor:
            return F.linear(x, w.to(x.dtype)).view(B, S, n, self.head_dim).transpose(1, 2)

        q, k = rotate(heads(self.q, self.heads), cos, sin), rotate(heads(self.k, self.kv_heads), cos, sin)
        return q, k, heads(self.v, self.kv_heads)

    def rest(self, h: Tensor, attended: Tensor) -> Tensor:
        B, _, S, _ = attended.shape
        h = h + F.linear(attended.transpose(1, 2).reshape(B, S, -1), self.o.to(h.dtype))
        x = self.post_attention_layernorm(h)
        inner = F.silu(F.linear(x, self.gate_proj.to(h.dtype))) * F.linear(x, self.up_proj.to(h.dtype))
        return h + F.linear(inner, self.down_proj.to(h.dtype))

    def unroll(self, taps: Tensor, embed: Tensor, token: Tensor, position: Tensor, mask: Tensor) -> list[Tensor]:
        """Logits [B, S, draft vocabulary] of each draft step, for every root position, on the true tokens."""
        h = F.linear(taps, self.fc.to(taps.dtype))
        out: list[Tensor] = []
        keys: list[Tensor] = []  # of step 0 for all roots, then of each later step for its own root alone
        values: list[Tensor] = []
        repeat = self.heads // self.kv_heads
        for j in range(STEPS):
            ahead = token.roll(-1 - j, dims=1)
            q, k, v = self.project(F.embedding(ahead, embed).to(h.dtype), h, position + j)
            keys.append(k.repeat_interleave(repeat, 1))
            values.append(v.repeat_interleave(repeat, 1))
            scores = (q @ keys[0].mT).float().masked_fill(~mask, float("-inf"))
            own = [(q * k).float().sum(-1, keepdim=True) for k in keys[1:]]
            share = (torch.cat([scores, *own], dim=-1) / math.sqrt(self.head_dim)).softmax(-1).to(q.dtype)
            S = token.shape[1]
            attended = share[..., :S] @ values[0]
            for i, v in enumerate(values[1:]):
                attended = attended + share[..., S + i : S + i + 1] * v
            h = self.rest(h, attended)
            out.append(F.linear(self.norm(h), self.lm_head.to(h.dtype)).float())
        return out

    def tensors(self, draft_ids: Tensor, vocab: int) -> dict[str, Tensor]:
        """The public layout; `draft_ids` are the target ids of the draft vocabulary, ascending."""
        out = {f"midlayer.{new}.weight": getattr(self, old) for old, new in NAMES.items()}
        out |= {f"midlayer.{n}.weight": getattr(self, n).weight for n in NORMS}
        out |= {"fc.weight": self.fc, "norm.weight": self.norm.weight, "lm_head.weight": self.lm_head}
        out = {name: t.detach().bfloat16().contiguous().cpu() for name, t in out.items()}
        known = torch.zeros(vocab, dtype=torch.bool)
        known[draft_ids] = True
        out["d2t"], out["t2d"] = draft_ids.cpu() - torch.arange(len(draft_ids)), known
        return out


def load_head(folder: Path, c: Any) -> tuple[Head, Tensor]:
    """(head, target ids of its vocabulary) from a shipped folder, or from one that a stage wrote."""
    shipped = folder / "model.safetensors"
    tensors = load_file(shipped if shipped.exists() else folder / "eagle3.safetensors")
    head = Head(c.hidden, c.heads, c.kv_heads, c.head_dim, 2 * c.hidden, len(tensors["d2t"]), c.norm_eps)
    with torch.no_grad():
        for ours, theirs in NAMES.items():
            getattr(head, ours).copy_(tensors[f"midlayer.{theirs}.weight"])
        for name in NORMS:
            getattr(head, name).weight.copy_(tensors[f"midlayer.{name}.weight"])
        head.fc.copy_(tensors["fc.weight"])
        head.norm.weight.copy_(tensors["norm.weight"])
        head.lm_head.copy_(tensors["lm_head.weight"])
    return head, tensors["d2t"] + torch.arange(len(tensors["d2t"]))


@torch.no_grad()
def move_vocabulary(head: Head, old_ids: Tensor, new_ids: Tensor, lm_head: Tensor) -> None:
    """Let the head's rows stand for `new_ids`; a token that it did not have begins as the target's row."""
    rows = lm_head[new_ids].clone()
    at = {token: i for i, token in enumerate(old_ids.tolist())}
    for i, token in enumerate(new_ids.tolist()):
        if token in at:
            rows[i] = head.lm_head[at[token]]
    head.lm_head.copy_(rows)


# ---- the target's own outputs -------------------------------------------------------------------


def _prompts(job: tuple[str, int, int, int]) -> list[list[int]]:
    tokenizer, edition, seed, index = job
    vocabulary = data._vocabulary(tokenizer)
    rng = Random(f"eagle/{seed}/{index}")
    prompts: list[list[int]] = []
    while len(prompts) < PART:
        if edition == 2 and rng.random() < CONVERSATIONS:
            problems = second_edition.group(rng, seed, rng.getrandbits(48))
            problems = rng.sample(problems, min(BRANCHES, len(problems)))
        else:
            problems = group(rng, MIXTURE, sentences=(10, 60))
        prompts += [render_prompt(vocabulary, p.prompt()) for p in problems]
    return prompts[:PART]


def own_outputs(target: GptOss, prompts: list[list[int]], rows: int = 1024) -> list[tuple[list[int], int]]:
    """(prompt + greedy completion, length of the prompt)."""
    ordered = sorted(prompts, key=len)
    done: list[tuple[list[int], int]] = []
    for i in range(0, len(ordered), rows):
        part = ordered[i : i + rows]
        replies = target.generate(part, 200, quantized=False, chunk=128)  # scores of many rows are large
        done += [(p + c, len(p)) for p, c in zip(part, replies, strict=True)]
    return done


def pack(conversations: list[tuple[list[int], int]], length: int, device: str) -> Packed:
    """Whole conversations in rows, no branches; weight 2 where the next token is the target's own."""
    rows: list[dict[str, list[int]]] = []
    room: list[int] = []
    for number, (tokens, prompt) in enumerate(conversations):
        if len(tokens) > length:
            continue
        row = next((i for i in range(max(0, len(rows) - 4), len(rows)) if room[i] >= len(tokens)), len(rows))
        if row == len(rows):
            rows.append({f: [] for f in data.FIELDS})
            room.append(length)
        r = rows[row]
        r["token"] += tokens
        r["target"] += [*tokens[1:], 0]
        r["weight"] += [0] * (prompt - 1) + [2] * (len(tokens) - prompt) + [0]
        r["position"] += range(len(tokens))
        r["document"] += [number] * len(tokens)
        r["branch"] += [0] * len(tokens)
        room[row] -= len(tokens)
    for r, free in zip(rows, room, strict=True):
        for f in data.FIELDS:
            r[f] += [-1 if f == "document" else 0] * free
    return Packed(**{f: torch.tensor([r[f] for r in rows], device=device) for f in data.FIELDS})


@dataclass
class TargetOutputs:
    """What the head learns from: the target's hidden states, and its logits over the draft vocabulary."""

    taps: Tensor
    teacher: Tensor


def rows_of(p: Packed, index: Tensor) -> Packed:
    return Packed(**{f: getattr(p, f)[index] for f in data.FIELDS})


# ---- training and measuring ---------------------------------------------------------------------


def head_loss(
    head: Head, embed: Tensor, batch: Packed, mask: Tensor, outputs: TargetOutputs, to_draft: Tensor
) -> Tensor:
    """Cross-entropy with the target's distribution over the draft vocabulary, later steps counting less."""
    out = torch.zeros((), device=batch.token.device)
    for j, drafted in enumerate(head.unroll(outputs.taps, embed, batch.token, batch.position, mask)):
        shift = 1 + j  # the root at t drafts what the target says after the token at t + shift
        want = outputs.teacher.roll(-shift, dims=1).float().softmax(-1)
        valid = (batch.weight == 2) & (batch.weight.roll(-shift, dims=1) == 2)
        valid &= batch.document == batch.document.roll(-shift, dims=1)
        valid &= to_draft[batch.target.roll(-shift, dims=1)] >= 0
        valid[:, -shift:] = False
        each = -(want * drafted.log_softmax(-1)).sum(-1)
        out = out + 0.8**j * (each * valid).sum() / valid.sum().clamp(min=1)
    return out


@torch.no_grad()
def run_target(target: GptOss, batch: Packed, draft_ids: Tensor, dtype: torch.dtype) -> TargetOutputs:
    """Run the target over a batch."""
    masks = dense_masks(batch, target.c.window)
    taps_at = [i - 1 for i in LAYERS]
    h, _, taps = target.hidden(batch.token, batch.position, *masks, dtype=dtype, quantized=False, taps=taps_at)
    return TargetOutputs(torch.cat(taps, dim=-1), F.linear(h, target.lm_head[draft_ids].to(dtype)))


def acceptance(matches: list[Tensor], batch: Packed) -> tuple[float, list[float]]:
    """(mean tokens per verification, share accepted at each step), walking every reply as an engine would.

    matches[j][row, t]: draft step j of root t is the token the target wrote. A step needs the token before it accepted.
    """
    steps = tokens = 0
    reached, hit = [0] * STEPS, [0] * STEPS
    weight, document = batch.weight.tolist(), batch.document.tolist()
    ok = [m.tolist() for m in matches]
    for row in range(len(weight)):
        t, n = 0, len(weight[row])
        while t < n:
            if weight[row][t] != 2:
                t += 1
                continue
            # the target has just produced the token at t + 1; the draft guesses t + 2 ...
            accepted = 0
            for j in range(STEPS):
                at = t + 1 + j
                if at >= n or weight[row][at] != 2 or document[row][at] != document[row][t]:
                    break
                reached[j] += 1
                if not ok[j][row][t]:
                    break
                hit[j] += 1
                accepted += 1
            steps += 1
            tokens += accepted + 1
            t += accepted + 1
    return tokens / max(1, steps), [h / max(1, r) for h, r in zip(hit, reached, strict=True)]


def held_out(target: GptOss, tokenizer: str, per_task: int, device: str, seed: int = 2000) -> Packed:
    """Conversations of every task of the first edition but the longest, the replies the target's own."""
    problems = [problem(t, seed, i) for t in TASKS if t != "needle" for i in range(per_task)]
    return _answered(target, tokenizer, problems, device)


def held_out_conversations(target: GptOss, tokenizer: str, count: int, device: str, seed: int = 2000) -> Packed:
    """Turns of the second edition's conversations with names that training never has, in as many of them with seen
    phrasings as with new ones; the replies are the target's own."""
    wordings: tuple[Split, ...] = ("train", "held-out")
    problems = [p for wording in wordings for p in second_edition.held_out_problems(wording, seed, count)]
    return _answered(target, tokenizer, problems, device)


def _answered(target: GptOss, tokenizer: str, problems: list[Problem], device: str) -> Packed:
    vocabulary = data._vocabulary(tokenizer)
    prompts = [render_prompt(vocabulary, p.prompt()) for p in problems]
    return pack(own_outputs(target, prompts, rows=1024 if device == "cuda" else 26), LENGTH, device)


def _parts(batch: Packed, rows: int = 16) -> list[Packed]:
    return [rows_of(batch, i) for i in torch.arange(batch.token.shape[0], device=batch.token.device).split(rows)]


@torch.no_grad()
def head_acceptance(
    head: Head, target: GptOss, batch: Packed, draft_ids: Tensor, dtype: torch.dtype
) -> tuple[float, list[float]]:
    matches: list[list[Tensor]] = []
    for part in _parts(batch):
        full, _ = dense_masks(part, target.c.window)
        taps = run_target(target, part, draft_ids, dtype).taps
        drafted = [draft_ids[d.argmax(-1)] for d in head.unroll(taps, target.embed, part.token, part.position, full)]
        matches.append([d == part.token.roll(-2 - j, dims=1) for j, d in enumerate(drafted)])
    return acceptance([torch.cat(of_step) for of_step in zip(*matches, strict=True)], batch)


@torch.no_grad()
def draft_acceptance(draft: GptOss, batch: Packed, dtype: torch.dtype) -> tuple[float, list[float]]:
    """Of a draft model: on the true prefix its guess for t + 2 + j stands at t + 1 + j."""
    right: list[Tensor] = []
    for part in _parts(batch):
        masks = dense_masks(part, draft.c.window)
        h, _, _ = draft.hidden(part.token, part.position, *masks, dtype=dtype, quantized=False)
        right.append(F.linear(h, draft.lm_head.to(dtype)).argmax(-1) == part.token.roll(-1, dims=1))
    return acceptance([torch.cat(right).roll(-1 - j, dims=1) for j in range(STEPS)], batch)


def stage(args: Namespace, log: Callable[..., None], device: str, target: GptOss) -> None:
    """Train the head for `target` and write its tensors to --out. With --seconds it takes so long in all."""
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    began = time.time()
    show = partial(print, file=sys.stderr, flush=True)
    target.requires_grad_(False).round_experts()
    jobs = [(str(args.tokenizer), args.edition, args.seed, i) for i in range(-(-args.own // PART))]
    with multiprocessing.get_context("spawn").Pool(max(1, min(args.workers, len(jobs)))) as pool:
        prompts = [p for part in pool.map(_prompts, jobs) for p in part][: args.own]
    rng = Random(args.seed)
    rng.shuffle(prompts)
    conversations: list[tuple[list[int], int]] = []
    for at in range(0, len(prompts), 2 * PART):
        if conversations and args.seconds and time.time() - began >= OWN_SHARE * args.seconds:
            break
        conversations += own_outputs(target, prompts[at : at + 2 * PART], rows=PART if cuda else 32)
    rng.shuffle(conversations)
    rows = 16 if cuda else 2
    packed = pack(conversations, LENGTH, device)
    show(f"{len(conversations)} own outputs, {packed.token.numel()} tokens, {time.time() - began:.0f} s")
    c = target.c
    counts = torch.bincount(packed.target[packed.weight == 2], minlength=c.vocab)
    draft_ids = counts.topk(DRAFT_VOCAB).indices.sort().values
    if args.head:
        head, old_ids = load_head(args.head, c)
        head = head.to(device)
        move_vocabulary(head, old_ids, draft_ids, target.lm_head)
    else:
        head = Head(c.hidden, c.heads, c.kv_heads, c.head_dim, 2 * c.hidden, DRAFT_VOCAB, c.norm_eps).to(device)
    to_draft = torch.full((c.vocab,), -1, device=device)
    to_draft[draft_ids] = torch.arange(DRAFT_VOCAB, device=device)
    parts = [
        run_target(target, rows_of(packed, i), draft_ids, dtype)
        for i in torch.arange(packed.token.shape[0], device=device).split(rows)
    ]
    outputs = TargetOutputs(torch.cat([s.taps for s in parts]), torch.cat([s.teacher for s in parts]))
    del parts
    show(f"target seen, {time.time() - began:.0f} s")
    gentle = 0.25 if args.head and args.edition == 1 else 1.0  # a head of the first edition is far from the second's
    optimizer = Optimizer(head, muon=0.02 * gentle, adam=2e-3 * gentle, decay=0.03)
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.long)
    learning = time.time()
    for step in range(args.steps):
        progress = step / args.steps
        if args.seconds:
            progress = (time.time() - learning) / max(1e-9, began + args.seconds - learning)
        if len(order) < rows:
            order = torch.randperm(packed.token.shape[0], generator=generator)
        index, order = order[:rows].to(device), order[rows:]
        batch = rows_of(packed, index)
        full, _ = dense_masks(batch, c.window)
        loss = head_loss(
            head, target.embed, batch, full, TargetOutputs(outputs.taps[index], outputs.teacher[index]), to_draft
        )
        loss.backward()
        optimizer.step(min(1.0, (step + 1) / min(30, 1 + args.steps // 8), max(0.03, (1.0 - progress) / 0.6)))
        optimizer.zero()
        last = step == args.steps - 1 or (args.seconds and progress >= 1.0)
        if step % (100 if cuda else 10) == 0 or last:
            log(stage="eagle", step=step, loss=round(float(loss.detach()), 4), seconds=round(time.time() - began, 1))
            show(f"eagle {step} loss {float(loss.detach()):.4f} {time.time() - began:.0f} s")
        if last:
            break
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(p.bfloat16().float())
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors(draft_ids, c.vocab), args.out / "eagle3.safetensors")


def config(c: Any) -> dict[str, Any]:
    """config.json of the head, as public gpt-oss heads have it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": c.hidden,
        "num_hidden_layers": 1, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "intermediate_size": 2 * c.hidden, "hidden_act": "silu", "vocab_size": c.vocab,
        "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": c.norm_eps, "rope_theta": THETA, "rope_scaling": None,
        "max_position_embeddings": c.max_context, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": list(c.eos_tokens),
        "pad_token_id": c.pad_token,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True,
                         "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True},
    }  # fmt: skip


def export(source: Path, target: Any, folder: Path) -> None:
    """Write models/tiny-eagle3 from the stage's output."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes((source / "eagle3.safetensors").read_bytes())
    (folder / "config.json").write_text(json.dumps(config(target), indent=2) + "\n", encoding="utf-8")
