"""The embedded model's answers through the engine on a GPU, token for token beside a CPU's.

    python -m bench run embedded-answers       # on any machine: the CPU's answers
    python -m bench run embedded               # on a GPU: compared with them

Held-out problems through `EngineCore` and the plan of this GPU, for every preset and activation format, with graphs and
without. A case named `padded` has idle heads and experts added (the same function), which is the shape the CUDA decode
kernel wants, and answers four problems at a time, so that this kernel decodes all of them. Answers are compared with
those of a CPU at the same gates, by the kernels that serve there; where one differs, the margin between the two tokens
at the first difference is computed on the CPU. Then some are asked again with torch's synchronisation checks as errors
around `launch`.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine.engine_steps import SyncErrors
from bench.measurement import ANSWERS, Row, Run, engine_sources, measurement, option, run_cases, write_records
from bench.padded_model import load_padded
from halfbyte import gates as gates_
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.errors import StepError, UsageError
from halfbyte.evals.suite import MAX_TOKENS, Suite
from halfbyte.lab import receipts
from halfbyte.lab.measure.accuracy import ALL
from halfbyte.lab.result import Cell, Check, Result, figure
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence

# (preset, activation): what the embedded model is asked as.
POINTS = [
    ("exact", "auto"), ("balanced", "auto"), ("fast", "auto"), ("balanced", "int8"), ("fast", "int8"), ("fast", "fp8"),
    ("fast", "mxfp8"), ("fast", "mxfp4"),
]  # fmt: skip
PADDED = [
    ("exact", "auto"), ("balanced", "auto"), ("fast", "auto"),
    ("fast", "prefill=fp8"),  # prompts through the fp8 tensor cores; an idle head's columns of o are groups of zeros
]  # fmt: skip
AT_ONCE = 4  # problems of a padded case that are answered together


def gates_of(preset: str, activation: str, eager: bool = False) -> gates_.Gates:
    flags = {"activation": activation} | ({"graphs": "off"} if eager else {})
    return gates_.parse(flags, env={}, preset=preset)


def embedded(gates: gates_.Gates, device: torch.device, padded: bool) -> GptOss:
    if not padded:
        return load.load_model(load.resolve_model(None), gates, device=device)
    return load_padded(gates, device)


def core_of(model: GptOss, gates: gates_.Gates, **options: Any) -> EngineCore:
    name = load.resolve_model(None) if model.config.vocab < 100_000 else load.resolve_model("random:120b")
    return core_for(model, load.tokenizer_of(name), EngineOptions(gates=gates, **options))[0]


def complete(core: EngineCore, prompts: list[list[int]], most: int, ignore_eos: bool = False) -> list[list[int]]:
    out: dict[str, list[int]] = {}
    for p in prompts:
        request = Request(p, SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=ignore_eos))
        out[request.id] = []
        core.submit(request)
    while core.has_work:
        for id, delta in core.step():
            if delta.finish == "error":
                raise StepError(f"a request failed: {delta.error}")
            out[id] += delta.tokens
    return list(out.values())


# ---- meaning --------------------------------------------------------------------------------------------------------


def ask(model: GptOss, preset: str, activation: str, per_task: int, padded: bool, eager: bool) -> dict[str, Any]:
    gates, device = gates_of(preset, activation, eager), model.device.type
    start = time.perf_counter()
    suite = Suite("tiny", 0, per_task)
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    prompts = [item.prompt for item in suite.items(tokenizer)]
    room = {"kv_gib": 2.0} if device == "cuda" else {}
    together = AT_ONCE if padded else 64
    core = core_of(model, gates, max_context=max(map(len, prompts)) + MAX_TOKENS, max_seqs=together, **room)
    loaded = time.perf_counter()
    answers = complete(core, prompts, MAX_TOKENS)
    replies = iter(answers)
    report = suite.run(tokenizer, lambda ps, n: [next(replies) for _ in ps])
    done = time.perf_counter()
    clean = None if device != "cuda" else undisturbed(core, prompts[:AT_ONCE])
    core.close()
    phases = {regime: sorted(model.plan.record.phases(regime)) for regime in model.plan.selection.chosen}
    return {
        "preset": preset, "activation": activation, "padded": padded, "eager": eager, "device": device,
        "right": {t: s.right for t, s in report.tasks.items()}, "accuracy": report.accuracy,
        "well_formed": report.well_formed, "phases": phases, "ready_s": loaded - start, "run_s": done - loaded,
        "tokens": sum(map(len, answers)), "answers": answers,
        "record": model.plan.record.as_dict(), "no_hidden_synchronisation": clean,
    }  # fmt: skip


def undisturbed(core: EngineCore, prompts: list[list[int]]) -> bool | str:
    """Whether the problems have the same answers each time, the last time with every hidden wait an error."""
    first = [complete(core, prompts, MAX_TOKENS) for _ in range(2)][-1]  # everything is compiled and captured
    core.observer = SyncErrors()
    try:
        return complete(core, prompts, MAX_TOKENS) == first
    except StepError as e:
        return str(e)


def compare(mine: dict[str, Any], expected: dict[str, Any], per_task: int) -> dict[str, Any]:
    """Equal answers, and of the others the margin on the CPU at the first difference."""
    suite = Suite("tiny", 0, per_task)
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    items = suite.items(tokenizer)
    differ = []
    model: GptOss | None = None
    for item, a, b in zip(items, mine["answers"], expected["answers"], strict=True):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip([*a, -1], [*b, -1], strict=False)) if x != y)
        model = model or embedded(gates_of(mine["preset"], mine["activation"]), torch.device("cpu"), False)
        prefix = item.prompt + b[:at]
        logits = SingleSequence(model, len(prefix) + 1).feed(prefix)[0].float()
        margin = float(logits[b[at]] - logits[a[at]]) if at < min(len(a), len(b)) else None
        differ.append({"task": item.problem.task, "token": at, "margin": margin, "spread": float(logits.std())})
    same = len(items) - len(differ)
    return {"problems": len(items), "equal": same, "share": same / len(items), "differ": differ[:40]}


def evaluate(options: Options) -> list[dict[str, Any]]:
    """Every case in a process of its own (compilers run beside each other), `jobs` at a time."""
    stored = json.loads(options.answers.read_text(encoding="utf-8"))
    if stored["asked"] != question_hash():
        raise UsageError(f"{options.answers} holds answers of another model or to other problems; make it again.")
    cases = [(p, a, False) for p, a in POINTS] + [(p, a, True) for p, a in PADDED]
    if options.only:
        only = options.only
        cases = [c for c in cases if c[0] in only or c[1] in only or ("padded" in only and c[2])]
    done: list[dict[str, Any]] = []
    shared = (stored["per_task"], options.answers)
    for outcome in run_cases(run_case, cases, *shared, jobs=options.jobs, seconds=options.seconds):
        records = outcome.records
        if outcome.failed:
            records.append({"case": outcome.case, "failed": outcome.failed})
        for record in records:
            print(summary(record), flush=True)
        done += records
    return done


def result_of(case: dict[str, Any]) -> Result:
    if "failed" in case:
        preset, activation, padded = case["case"]
        cell = Cell("accuracy", "tiny", preset, {"activation": activation}, "engine", {"padded": padded})
        return Result(cell, refused=case["failed"])
    compared = case["compared"]
    shape = {"padded": case["padded"], "problems": compared["problems"]}
    path = "engine without graphs" if case["eager"] else "engine"
    cell = Cell("accuracy", "tiny", case["preset"], {"activation": case["activation"]}, path, shape)
    quiet = case["no_hidden_synchronisation"]
    checks = [Check("no hidden synchronisation", quiet is True, note="" if isinstance(quiet, bool) else str(quiet))]
    if case["eager"]:
        checks.append(Check("tokens are those of graphs", case["equals_graphs"]))
    figures = (
        figure("equal_answers", "%", 100 * compared["share"], ALL), figure("right", "%", 100 * case["accuracy"], ALL),
        figure("right_on_cpu", "%", 100 * case["cpu_accuracy"], ALL),
    )  # fmt: skip
    detail = {"differ": compared["differ"], "tasks_that_differ": case["tasks_that_differ"], "phases": case["phases"]}
    holds = all(c.ok for c in checks)
    return Result(cell, figures if holds else (), tuple(checks), record=case["record"], detail=detail)


def summary(c: dict[str, Any]) -> str:
    if "failed" in c:
        return f"{c['case']}: {c['failed']}"
    margins = ", ".join(
        f"{d['task']} {d['margin']:.3f}" for d in c["compared"]["differ"][:6] if d["margin"] is not None
    )
    return (
        f"{c['preset']:8} {c['activation']:5} {'padded' if c['padded'] else 'plain ':6} "
        f"{'eager' if c['eager'] else 'graph'}: equal {c['compared']['equal']}/{c['compared']['problems']}, accuracy "
        f"{100 * c['accuracy']:.1f} % (CPU {100 * c['cpu_accuracy']:.1f}), tasks with another score: "
        f"{c['tasks_that_differ'] or 'none'}, no waits: {c['no_hidden_synchronisation']}"
        f"{', tokens of graphs: ' + str(c['equals_graphs']) if c['eager'] else ''}, {c['run_s']:.1f} s"
        f"{'; margins ' + margins if margins else ''}"
    )


def run_case(preset: str, activation: str, padded: bool, out: str, per_task: int, answers_file: str) -> None:
    """One process's part: a model through graphs, and where presets are compared, eagerly too."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    stored = json.loads(Path(answers_file).read_text(encoding="utf-8"))
    expected = stored["cases"][f"{preset} {activation}"]
    model = embedded(gates_of(preset, activation), torch.device("cuda"), padded)
    cases: list[dict[str, Any]] = []
    graphs: list[list[int]] = []
    for eager in (False, True)[: 1 + ((preset, activation) in PADDED)]:
        mine = ask(model, preset, activation, per_task, padded, eager)
        mine["compared"] = compare(mine, expected, per_task)
        mine["cpu_accuracy"] = expected["accuracy"]
        mine["tasks_that_differ"] = {
            task: [right, expected["right"][task]]
            for task, right in mine["right"].items()
            if right != expected["right"][task]
        }
        answers = mine.pop("answers")
        if eager:
            mine["equals_graphs"] = answers == graphs
        graphs = answers
        cases.append(mine)
        write_records(out, cases)


def question_hash() -> str:
    """What the answers are answers to: the model's bytes and the prompts."""
    digest = hashlib.sha256()
    for path in sorted(load.EMBEDDED.glob("*.safetensors")):
        digest.update(path.read_bytes())
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    digest.update(json.dumps([i.prompt for i in Suite("tiny", 0, 2).items(tokenizer)]).encode())
    return digest.hexdigest()[:16]


def cpu_answers(options: AnswerOptions) -> None:
    """Added to what the file holds, where that is of the same model and problems."""
    question = question_hash()
    record: dict[str, Any] = {"asked": question, "per_task": options.per_task, "cases": {}}
    if options.answers.exists():
        before = json.loads(options.answers.read_text(encoding="utf-8"))
        if (before["asked"], before["per_task"]) == (question, options.per_task):
            record = before
    cases = record["cases"]
    for preset, activation in dict.fromkeys(POINTS + PADDED):
        if options.only and not {preset, activation} & set(options.only):
            continue
        model = embedded(gates_of(preset, activation), torch.device("cpu"), False)
        case = ask(model, preset, activation, options.per_task, False, True)
        cases[f"{preset} {activation}"] = {k: case[k] for k in ("answers", "accuracy", "right")}
        print(f"{preset} {activation}: {100 * case['accuracy']:.1f} %, {case['run_s']:.0f} s", flush=True)
        options.answers.write_text(json.dumps(record), encoding="utf-8")


@dataclass(frozen=True)
class AnswerOptions:
    answers: Path = option(ANSWERS, "the file that is written, or added to")
    per_task: int = 4
    only: tuple[str, ...] = option((), "presets or activation formats; empty: all")


@measurement("embedded-answers", seconds=3600, receipt=False, routine=False)
def embedded_answers(run: Run, options: AnswerOptions) -> None:
    """The embedded model's answers on a CPU, which `embedded` compares a GPU's with."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    options.answers.parent.mkdir(parents=True, exist_ok=True)
    cpu_answers(options)


@dataclass(frozen=True)
class Options:
    answers: Path = option(ANSWERS, "the CPU's answers")
    only: tuple[str, ...] = option((), "presets, activation formats or padded; empty: all")
    jobs: int = option(12, "processes at a time")
    seconds: float = option(1e9, "stop what has not ended by then, keep the rest")


@measurement(
    "embedded", needs=("gpu", "answers"), seconds=150,
    rows=(Row("embedded model's answers, token for token a CPU's: exact / balanced / fast", "accuracy", "equal_answers",
              headline=True, path="engine", model="tiny", shape={"padded": True}, over="preset",
              values=("exact", "balanced", "fast"),
              gates={"activation": "auto"}),),
)  # fmt: skip
def embedded_on_gpu(run: Run, options: Options) -> None:
    cases = evaluate(options)
    names = {name for c in cases for names in c.get("phases", {}).values() for name in names}
    run.sources |= engine_sources(names) | receipts.weights(load.EMBEDDED)
    run.add(*map(result_of, cases))
