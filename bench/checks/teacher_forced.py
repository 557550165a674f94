"""The embedded model's logits through this GPU's plan beside the reference's on a CPU, token by token of one text.

    python -m bench run logits --set presets=exact,balanced,fast

The text is fed whole, in chunks of every regime, and one token at a time; then 32 tokens are decoded eagerly and by
replays of a graph, and must be the same. Bounds are in docs/numerics.md. Answers to problems are compared by
`embedded`. Times nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.measurement import Run, measurement, option
from halfbyte import gates as gates_
from halfbyte.engine.graphs import DecodeGraph
from halfbyte.gates import Gates
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict, choice_gap, rms
from halfbyte.lab.plan_comparison import reference_of, trace, trace_reference
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
    """Runs the tokens through both, the reference with the experts that the plan chose: of two that are nearly equal
    either may be taken, which moves every logit behind it. That they are a right choice is a comparison of its own.
    Wherever the reference's two highest logits are further apart than both errors could be, the highest is the same."""
    verdict = Verdict(f"logits of a text, {name}")
    mine, reference = SingleSequence(model, len(tokens)), SingleSequence(other, len(tokens))
    start, actual, expected, gaps = 0, [], [], list[float]()
    for count in chunks:
        part = tokens[start : start + count]
        seen = trace(model, mine.step(part, all_logits=True))
        chosen = [ids.to(other.device) for ids in seen.experts]
        replay = trace_reference(other, reference.step(part, all_logits=True), chosen)
        actual.append(seen.logits.cpu())
        expected.append(replay.logits.float().cpu())
        gaps += [choice_gap(router, ids) / float(router.std()) for router, ids in zip(replay.router, chosen)]
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


@dataclass(frozen=True)
class Options:
    presets: tuple[str, ...] = ("exact", "balanced", "fast")
    activation: str = option("auto", "as the flag of the same name")


@measurement("logits", needs=("gpu",), seconds=90)
def logits(run: Run, options: Options) -> None:
    torch.set_grad_enabled(False)
    run.sources |= receipts.weights(load.EMBEDDED)
    for preset in options.presets:
        gates = gates_.parse({"activation": options.activation}, env={}, preset=preset)
        verdicts, model = check_embedded(gates, torch.device("cuda"))
        run.sources |= receipts.measured({b.phase for bound in model.plan.bound.values() for b in bound})
        cell = Cell("logits", "tiny", preset, gates.changes(), "plan", {"rows": ROWS})
        facts = {v.case: v.facts for v in verdicts if v.facts}
        run.add(Result(cell, checks=tuple(v.as_check() for v in verdicts), detail=facts))
        print(*map(str, verdicts), sep="\n    ", flush=True)
