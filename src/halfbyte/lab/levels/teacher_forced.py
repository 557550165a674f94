"""The embedded model's logits through this GPU's plan beside the reference's on a CPU, token by token of one text.

    python -m halfbyte.lab.levels.teacher_forced --presets exact,balanced,fast

The text is fed whole, in chunks of every regime, and one token at a time; then 32 tokens are decoded eagerly and by
replays of a graph, and must be the same. Bounds are in docs/numerics.md. Answers to problems are compared by
`embedded`. Times nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from halfbyte import gates as gates_
from halfbyte.engine.graphs import DecodeGraph
from halfbyte.gates import Gates
from halfbyte.lab import environment, receipts
from halfbyte.lab.entry import finish, line_of
from halfbyte.lab.levels.correctness import reference_of, trace, trace_reference
from halfbyte.lab.levels.verdict import Verdict, choice_gap, rms
from halfbyte.lab.result import Cell, Result
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence, generate

TEXT = "The quick count of apples is 12. Then 7 more come, and 3 are eaten. How many are left? "
ROWS = 300
CHUNKS = {"whole": [ROWS], "in chunks": [100, 50, 30, 8, 4, 1, 1, 1], "by tokens": [1] * 20}
BOUND = 0.05  # on all logits of a text: twelve layers of the roundings in docs/numerics.md
WORST = 9 * BOUND  # of a single logit; as in decode_check
DECODED, PROMPT = 32, 100


def compare_logits(name: str, model: GptOss, other: GptOss, tokens: Sequence[int], chunks: Sequence[int]) -> Verdict:
    """The same tokens through both, the reference with the experts that the plan chose: of two that are nearly equal
    either may be taken, which moves every logit behind it. That they are a right choice is a comparison of its own.
    Wherever the reference's two highest logits are further apart than both errors could be, the highest is the same."""
    verdict = Verdict(f"logits of a text, {name}")
    mine, theirs = SingleSequence(model, len(tokens)), SingleSequence(other, len(tokens))
    start, actual, expected, gaps = 0, [], [], list[float]()
    for count in chunks:
        part = tokens[start : start + count]
        seen = trace(model, mine.step(part, all_logits=True))
        chosen = [ids.to(other.device) for ids in seen.experts]
        wanted = trace_reference(other, theirs.step(part, all_logits=True), chosen)
        actual.append(seen.logits.cpu())
        expected.append(wanted.logits.float().cpu())
        gaps += [choice_gap(router, ids) / float(router.std()) for router, ids in zip(wanted.router, chosen)]
        start += count
    x, y = torch.cat(actual), torch.cat(expected)
    verdict.compare("all logits", x, y, BOUND)
    noise = float((x - y).abs().max())
    verdict.add("worst logit", noise / rms(y), WORST)
    if gaps:  # one phase that runs everything shows no choice
        verdict.add("choice of experts beyond a tie", max(0.0, *gaps), WORST)
    highest = y.topk(2).values
    clear = highest[:, 0] - highest[:, 1] > 2 * noise
    same = x.argmax(-1) == y.argmax(-1)
    verdict.require("tokens with a clear margin are the same", bool(same[clear].all()))
    verdict.facts |= {"clear": float(clear.float().mean()), "same": float(same.float().mean())}
    return verdict


def compare_graph(model: GptOss, prompt: Sequence[int], count: int = DECODED) -> Verdict:
    """Tokens of replays against those of eager steps, greedily."""
    verdict = Verdict("tokens of a graph against eager steps")
    eager = list(generate(model, prompt, count, stop=()))
    length = len(prompt) + count
    sequence = SingleSequence(model, length)
    blocks = int(sequence.tables["full"].shape[1])
    first = int(sequence.feed(prompt)[0].argmax())
    graph = DecodeGraph(model, 1, blocks, feed_back=True)
    graph.capture()
    for kind in ("sliding", "full"):
        graph.step.block_tables[kind].copy_(sequence.tables[kind])
    graph.step.tokens.fill_(first)
    graph.step.positions.fill_(len(prompt))
    graph.step.kv_lens.fill_(len(prompt) + 1)
    replayed = [first]
    for _ in range(count - 1):
        graph.replay()
        replayed.append(int(graph.step.tokens[0]))
    verdict.require(f"{count} tokens are the same", replayed == eager)
    return verdict


def check_embedded(gates: Gates, device: torch.device) -> tuple[list[Verdict], GptOss]:
    """Every comparison of the embedded model at these gates, and the model that was compared."""
    name = load.resolve_model(None)
    model = load.load_model(name, gates, device=device)
    # The same roundings on both sides: a CPU's own kernels would take int8, and one rounding moves single logits far.
    same = gates if gates.activation != "auto" else replace(gates, activation=model.spec.activation)
    cpu = reference_of(load.load_model(name, replace(same, kv_dtype=model.spec.kv_dtype)))
    tokens = load.tokenizer_of(name).encode(TEXT * 12)[:ROWS]
    verdicts = [compare_logits(label, model, cpu, tokens, chunks) for label, chunks in CHUNKS.items()]
    if device.type == "cuda":
        verdicts.append(compare_graph(model, tokens[:PROMPT]))
    return verdicts, model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="exact,balanced,fast", help="with commas between")
    parser.add_argument("--activation", default="auto", help="as the flag of the same name")
    parser.add_argument("--out", type=Path, help="write the receipt here")
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    results, measured = [], receipts.weights(load.EMBEDDED)
    for preset in args.presets.split(","):
        gates = gates_.parse({"activation": args.activation}, env={}, preset=preset)
        verdicts, model = check_embedded(gates, torch.device("cuda"))
        measured |= receipts.measured({b.phase for bound in model.plan.bound.values() for b in bound})
        cell = Cell("logits", "tiny", preset, gates.changes(), "plan", {"rows": ROWS})
        facts = {v.case: v.facts for v in verdicts if v.facts}
        results.append(Result(cell, checks=tuple(v.as_check() for v in verdicts), detail=facts))
        print(line_of(results[-1]), *map(str, verdicts), sep="\n    ", flush=True)
    return finish("python -m halfbyte.lab.levels.teacher_forced", results, measured, args.out)


if __name__ == "__main__":
    sys.exit(main())
