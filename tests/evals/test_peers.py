"""Peers run the exported model to the same answers: transformers from the folder, llama.cpp from the GGUF we write.

200 held-out prompts of all tasks, greedy. An answer is what the judge reads: the final text or the call. Transformers
computes in float32 from the dequantised experts, as our CPU plan does. llama.cpp computes as its users have it: bf16
matrices, MXFP4 experts against activations rounded to 8 bits, a float16 cache, and yarn's ramp rounded outwards.

A greedy decoder writes our reply exactly if each of its tokens is the first choice after those before, so one pass over
prompt and reply tells; where it is not, the peer decodes for itself and the answers are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from halfbyte.engine.python_api import Engine
from halfbyte.engine.request import SamplingParams
from halfbyte.evals.suite import MAX_TOKENS, ParsedReply, Suite, read_reply
from halfbyte.evals.tasks import TASKS
from halfbyte.model import checkpoint
from halfbyte.model.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "tiny"
PROMPTS = 200
SAME = 0.99
Answer = tuple[str | None, tuple[str, str] | None, str | None]


def answer(reply: ParsedReply) -> Answer:
    return reply.final, reply.call, reply.fault


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.for_model(MODEL)


@pytest.fixture(scope="module")
def prompts(tok: Tokenizer) -> list[list[int]]:
    """The tasks in turn, so that the first 200 hold as many of each as can be."""
    each = -(-PROMPTS // len(TASKS))
    items = [item.prompt for item in Suite("quick", 4000, each).items(tok)]
    return [items[t * each + i] for i in range(each) for t in range(len(TASKS))][:PROMPTS]


@pytest.fixture(scope="module")
def ours(prompts: list[list[int]]) -> list[list[int]]:
    torch.set_num_threads(1)
    with Engine(str(MODEL), device="cpu") as engine:
        completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    return [c.tokens for c in completions]


def compare(
    name: str,
    tok: Tokenizer,
    prompts: list[list[int]],
    ours: list[list[int]],
    choices: Callable[[list[int]], Sequence[int]],
    decode: Callable[[list[int]], list[int]],
) -> None:
    """`choices` gives the peer's first choice after every token; `decode` lets it write its own reply."""
    other, differing = 0, []
    for prompt, mine in zip(prompts, ours, strict=True):
        if list(choices(prompt + mine[:-1]))[len(prompt) - 1 :] == mine:
            continue
        other += 1
        our_answer, their_answer = answer(read_reply(tok, mine)), answer(read_reply(tok, decode(prompt)))
        if their_answer != our_answer:
            differing.append(f"{tok.decode(prompt[-40:])!r}: ours {our_answer}, {name} {their_answer}")
    same = 1 - len(differing) / len(prompts)
    print(f"{name}: the same answer to {same:.1%} of {len(prompts)} prompts, {len(prompts) - other} token for token")
    print("\n".join(differing), flush=True)
    assert len(prompts) == PROMPTS
    assert same >= SAME


@pytest.mark.slow
def test_transformers_gives_the_same_answers(tok: Tokenizer, prompts: list[list[int]], ours: list[list[int]]) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    ).eval()

    @torch.no_grad()
    def choices(tokens: list[int]) -> list[int]:
        return [int(t) for t in model(torch.tensor([tokens])).logits[0].argmax(-1)]

    @torch.no_grad()
    def decode(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        return [int(t) for t in out[0, len(prompt) :]]

    compare("transformers", tok, prompts, ours, choices, decode)


@pytest.mark.peers
def test_llamacpp_gives_the_same_answers(
    tok: Tokenizer, prompts: list[list[int]], ours: list[list[int]], tmp_path: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install halfbyte[peers]")
    path = tmp_path / "tiny.gguf"
    checkpoint.save_gguf(checkpoint.load(MODEL), path, tokenizer=MODEL / "tokenizer.json")
    llama = llama_cpp.Llama(str(path), n_ctx=2048, n_batch=512, n_threads=1, logits_all=True, verbose=False)
    stops = set(checkpoint.read_config(MODEL).eos_tokens)

    def choices(tokens: list[int]) -> list[int]:
        llama.reset()
        llama.eval(tokens)
        return [int(t) for t in llama.scores[: len(tokens)].argmax(-1)]

    def decode(prompt: list[int]) -> list[int]:
        llama.reset()
        out: list[int] = []
        for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            out.append(int(token))
            if token in stops or len(out) == MAX_TOKENS:
                break
        return out

    try:
        for prompt in prompts[:28]:  # its tokenizer reads the rendered text to the same tokens, control tokens included
            assert llama.tokenize(tok.decode(prompt).encode(), add_bos=False, special=True) == prompt
        compare("llama.cpp", tok, prompts, ours, choices, decode)
    finally:
        llama.close()
