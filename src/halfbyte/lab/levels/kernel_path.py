"""Level 1.5: did the kernels run that the gates ask for? Must-see and must-not-see rules, by gate.

`check_path` gives an engine work of every regime, ends it, and compares what it ran with its gates. There are three
sources of evidence, the best one first: the record that halfbyte or its plugin writes when it ends (which phases,
kernels, formats and activations ran, and every difference from the plan), kernel names in a profiler's trace
(`lab/trace.py`), and the lines of an engine's log that say what it uses; lines that only list candidate backends are
ignored. Without evidence a gate is not proven: the level says NOT PROVEN, and a figure of such a cell is INVALID.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.formats.matrices import kinds_in
from halfbyte.gates import Gates
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Asker, Question
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Result
from halfbyte.lab.trace import read_trace
from halfbyte.plan.phase import AXIS, GROUP, Phase
from halfbyte.plan.select import all_phases

# Rows of a step: a prompt of so many tokens is batch or prefill on every architecture, and each further token decode.
REGIMES = {"batch": 24, "prefill": 300}
TRAFFIC = ("decode", *REGIMES)
TOKENS, DRAFTED = 4, 64  # of an answer; of one whose tokens can be drafted
LEAST_DRAFTED, MOST_DRAFTED = 3, 16  # such answers
DRAFTS = "(?:halfbyte_drafted_tokens|vllm:spec_decode_num_draft_tokens)"  # counters of metrics
UNPROVEN = "not_proven"  # in a result's detail: sentences
NOTHING = "nothing shows"  # how the note of a check begins that had no evidence
KERNEL_AXES = {"moe_kernel": "moe", "linear_kernel": "linear", "attention": "attention"}


@dataclass(frozen=True)
class PathEvidence:
    """What a witness says. `record` is the document of `engine/record_file.py`, or the plugin's in the same form."""

    record: Mapping[str, Any] | None = None
    statements: tuple[str, ...] = ()  # lines of a log that say what is used
    kernels: tuple[str, ...] = ()  # names in a trace
    drafted: float | None = None  # tokens, by the engine's metrics; None where it has none, or was not asked

    @property
    def silent(self) -> bool:
        return self.record is None and not self.statements and not self.kernels

    @property
    def observed(self) -> list[str]:
        """For people: what ran, once each."""
        names = [k for _, phase in self.phases() for k in (f"{phase['phase']}: {_names(phase)}",)]
        return list(dict.fromkeys([*names, *self.kernels, *(self.statements if self.record is None else ())]))

    def phases(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """(regime, phase that ran in it) of the record."""
        record = (self.record or {}).get("record") or {}
        for regime, ways in (record.get("regimes") or {}).items():
            for way in ways:
                for phase in way["phases"]:
                    yield regime, phase

    def ways(self, regime: str) -> list[str]:
        record = (self.record or {}).get("record") or {}
        return [str(way["way"]) for way in (record.get("regimes") or {}).get(regime, ())]


def _names(phase: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(str(k["name"]) for k in phase["kernels"]))


# ---- the level ------------------------------------------------------------------------------------------------------


def exercise(asker: Asker, gates: Gates) -> float | None:
    """Work of every regime, and repeated text for an engine that should draft tokens: until it has, if it counts them.
    A controller that weighs what drafts cost begins with none. The drafted tokens, where they were asked for."""
    for i, rows in enumerate(REGIMES.values()):
        asker.ask(Question([5 + (i + 7 * j) % 200 for j in range(rows)], tokens=TOKENS, exactly=True))
    if gates.speculate == "off":
        return None
    for i in range(MOST_DRAFTED):
        if i >= LEAST_DRAFTED and asker.metric(DRAFTS) > 0:
            break
        asker.ask(Question([5 + (i + 7 * (j % 12)) % 200 for j in range(96)], tokens=DRAFTED, exactly=True))
    return asker.metric(DRAFTS)


def check_path(subject: Subject, gates: Gates | None = None) -> Result:
    gates = subject.gates if gates is None else gates
    cell = subject.cell("kernel path", gates)
    engine = subject.process("kernel path", gates)

    def start_and_exercise() -> None:
        with engine:
            engine.drafted = exercise(engine.asker, gates)

    if failure := subject.attempt(cell, engine, start_and_exercise):
        return failure
    checks, evidence = path_checks(subject, engine, gates)
    detail: dict[str, Any] = {"observed": evidence.observed[:60], "witness": witness(evidence)}
    unproven = [c for c in checks if not c.ok and c.note.startswith(NOTHING)]
    if evidence.silent:
        detail[UNPROVEN] = ["Nothing says which kernels ran: neither a record, nor a log, nor a trace."]
    elif unproven:
        detail[UNPROVEN] = [f"{c.what}: {c.note}" for c in unproven]
    record = (evidence.record or {}).get("record")
    return subject.judged(cell, engine, [c for c in checks if c not in unproven], detail=detail, record=record)


def path_checks(subject: Subject, ended: PeerProcess, gates: Gates) -> tuple[list[Check], PathEvidence]:
    """Checks of an engine that has ended, and the evidence for them."""
    evidence = evidence_of(subject, ended)
    if ended.launch.record is not None and evidence.record is None:
        return [
            Check("it says which kernels ran", False, note="the engine left no record: it did not end well")
        ], evidence
    traffic = TRAFFIC if evidence.record is not None and subject.peer.name == "halfbyte" else ()
    return judge(gates, evidence, traffic), evidence


def path_problem(checks: Sequence[Check], prefix: str = "") -> str:
    """Why figures of an engine with these checks are INVALID, or an empty text."""
    failed = [c for c in checks if not c.ok]
    if not failed:
        return ""
    texts = [f"{prefix}{c.what.removesuffix(' ran')}: {c.note}" for c in failed]
    return f"{'kernel path not proven' if path_unproven(checks) else 'wrong kernel path'}: {'; '.join(texts)}"


def path_unproven(checks: Sequence[Check]) -> bool:
    """Whether nothing speaks against the kernels but that nothing shows them."""
    return all(c.ok or c.note.startswith(NOTHING) for c in checks)


def evidence_of(subject: Subject, ended: PeerProcess) -> PathEvidence:
    """What shows which kernels an engine ran that has ended."""
    record = read_record(ended.launch.record)
    log = subject.log or (ended.log if ended.log.is_file() else None)
    return PathEvidence(
        record,
        read_log(log) if log is not None else (),
        read_trace(subject.trace).kernels if subject.trace is not None else (),
        ended.drafted,
    )


def witness(evidence: PathEvidence) -> str:
    if evidence.record is not None:
        return "record"
    return "trace" if evidence.kernels else "log" if evidence.statements else "none"


# ---- reading evidence ------------------------------------------------------------------------------------------------

# Only what a line says it uses; what follows "out of" is what it might have used.
_SAYS = re.compile(
    r"\b(using|selected|enabled|will use|chose|capturing|captured|running with|llama_kv_cache: size|"
    r"model buffer size)\b",
    re.IGNORECASE,
)
# And only where it speaks of what computes: an engine also uses threads for HTTP, and selects a slot for a request.
_COMPUTES = re.compile(
    r"kernel|backend|att(?:ention|n)|moe|expert|linear|gemm|quant|mxfp|fp[48]|b?f(?:p|loat)?(?:16|32)|marlin|cutlass|"
    r"triton|trtllm|flashinfer|graph|kv|cache|buffer|specul|draft|n-?gram|eagle",
    re.IGNORECASE,
)
_MIGHT = re.compile(
    r"\bout of\b|\bpotential\b|\bavailable\b|\bsupported\b.*:|\bcandidates?\b|\bnot using\b", re.IGNORECASE
)


# What an engine says when it takes another kernel than the one that was chosen. vLLM, SGLang, FlashInfer, llama.cpp.
FALLBACK = re.compile(
    r"\b(?:fall(?:ing|s|en)?[ -]?back|fell back|revert(?:ing|s|ed)?|switch(?:ing|es|ed)?|default(?:ing|s|ed)?)"
    r"(?: \w+)? to\b|\bleveraging the\b|\bwill be ignored\b|\binstead of\b|\boffloaded 0/",
    re.IGNORECASE,
)

# What vLLM says of how it drafts. That it does, its metrics say.
_SETTINGS = re.compile(r"speculative_config=\w+\([^)]*\)")
# And when it passes over the one that was asked for, without a word about what it takes.
_PASSED_OVER = re.compile(r"\b(?:can ?not|can't) use\b", re.IGNORECASE)


def read_log(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as e:
        raise UsageError(f"the log {path} cannot be read ({e.strerror or e}).") from None
    statements = []
    for line in lines:
        if settings := _SETTINGS.search(line):
            statements.append(settings[0])
        other = FALLBACK.search(line) or _PASSED_OVER.search(line)
        claim = line if other else _MIGHT.split(line)[0]
        if other or (_SAYS.search(claim) and _COMPUTES.search(claim)):
            statements.append(claim.strip()[:300])
    return tuple(dict.fromkeys(statements))


def read_record(path: Path | None) -> Mapping[str, Any] | None:
    """None where the engine left none: it was killed, or writes none."""
    if path is None or not path.is_file():
        return None
    try:
        body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UsageError(f"{path} is no record of kernels ({e}).") from None
    if not isinstance(body, dict) or "regimes" not in (body.get("record") or {}):
        raise UsageError(f"{path} is no record of kernels: it has no regimes.")
    return body


# ---- rules for names and lines ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What a gate's value must show, and must not, in the names of kernels or the statements of a log."""

    axis: str
    value: str
    must: str = ""
    must_not: str = ""
    about: str = ""  # only statements that speak of this
    names: str = ""  # only kernels with such names: a dense product says nothing about the experts


_MOE, _ATTENTION = r"moe|expert|mxfp4", r"attention|attn"
# Names of kernels. What Inductor fuses around experts or attention has their names in its own, and is neither.
_FUSED = r"^(?!.*\btriton_(?:poi|red|per|tem)_)"
_EXPERTS = _FUSED + r".*(?:moe|expert|group|matmul_ogs|fp4|e2m1|decode_step)"
_ATTENDS = _FUSED + r".*(?:attn|attention|fmha|flash_|flashinfer|Batch(?:Prefill|Decode)With)"
_FLASHINFER = r"flashinfer|Batch(?:Prefill|Decode)With"  # or one of its kernels
_DENSE = r"^(?!.*(?:moe|expert|repack))"
RULES: tuple[Rule, ...] = (
    Rule("moe_kernel", "marlin", r"marlin", r"cutlass|triton|trtllm", _MOE, _EXPERTS),
    Rule("moe_kernel", "cutlass", r"cutlass", r"marlin|triton", _MOE, _EXPERTS),
    Rule("moe_kernel", "triton", r"triton|matmul_ogs", r"marlin|cutlass", _MOE, _EXPERTS),
    Rule("moe_kernel", "gemv", r"gemv|gemm fallback|decode_step", "", _MOE, _EXPERTS),
    Rule("moe_kernel", "vllm", r"\busing\b.*\bmoe backend", "", _MOE, _EXPERTS),  # whichever vLLM takes by itself
    Rule("linear_kernel", "marlin", r"marlin", "", _DENSE + r".*(?:linear|qkv|dense|mxfp4)", _DENSE),
    Rule("activation", "mxfp8", r"mxfp8", "", r"quant|activation|moe|mxfp"),
    Rule("activation", "fp8", r"fp8|e4m3", "", r"quant|activation|moe"),
    Rule("attention", "triton", r"triton|kernel_unified_attention", _FLASHINFER + r"|flash_", _ATTENTION, _ATTENDS),
    Rule("attention", "flashinfer", _FLASHINFER, r"triton|kernel_unified_attention|flash_", _ATTENTION, _ATTENDS),
    Rule("kv_dtype", "fp8", r"fp8", "", r"kv|cache"),
    Rule("kv_dtype", "bf16", r"\bk \(bf16\).* v \(bf16\)", r"\b[kv] \((?!bf16)", r"llama_kv_cache"),
    Rule("kv_dtype", "f32", r"\bk \(f32\).* v \(f32\)", r"\b[kv] \((?!f32)", r"llama_kv_cache"),
    Rule("speculate", "ngram", r"n-?gram", "", r"specul|draft|n-?gram"),
    Rule("speculate", "eagle3", r"eagle", "", r"specul|draft|eagle"),
    Rule("graphs", "off", "", r"capturing.*graph|graph.*captur", ""),
)
# Gate -> how the name of its proposer begins, in the record.
PROPOSERS = {"ngram": "Ngram", "suffix": "Suffix", "draft": "DraftModel", "eagle3": "Eagle3"}


def judge(gates: Gates, evidence: PathEvidence, traffic: Sequence[str] = ("decode", "prefill")) -> list[Check]:
    """A check for every gate that is not at its default. Where nothing shows a gate's effect its check fails, with a
    note that begins with NOTHING."""
    defaults = ("auto", "checkpoint") if evidence.record is not None else ("auto", "checkpoint", "float", "on")
    requests = {name: value for name, value in gates.changes().items() if value not in defaults}
    if evidence.record is not None:
        return [*_by_record(gates, requests, evidence, traffic)]
    if evidence.silent:
        if not requests:
            return []
        return [Check("the requested kernels ran", False, note=f"{NOTHING} them: no record, log or trace")]
    return [*_by_names(requests, evidence)]


def _by_names(requests: Mapping[str, str], evidence: PathEvidence) -> Iterable[Check]:
    for axis, value in requests.items():
        if axis == "speculate" and evidence.drafted:
            yield _drafted_check(value, evidence)
            continue
        rules = [r for r in RULES if r.axis == axis and (r.value == value or value.startswith(f"{r.value}-"))]
        if not rules:
            yield Check(f"{axis} {value} ran", False, note=f"{NOTHING} it: no rule says what a log would have")
            continue
        for rule in rules:
            used = [s for s in evidence.statements if not (_PASSED_OVER.search(s) or _SETTINGS.fullmatch(s))]
            lines = [s for s in used if not rule.about or re.search(rule.about, s, re.IGNORECASE)]
            names = [k for k in evidence.kernels if not rule.names or re.search(rule.names, k, re.IGNORECASE)]
            seen = [*names, *lines]
            fallen = [s for s in evidence.statements if _fallback(s, rule)]
            wrong = [s for s in seen if rule.must_not and re.search(rule.must_not, s, re.IGNORECASE)] + fallen
            right = [s for s in seen if rule.must and s not in fallen and re.search(rule.must, s, re.IGNORECASE)]
            note = f"must not be seen: {wrong[0]}" if wrong else f"seen: {right[0]}" if right else ""
            if rule.must and not right and not wrong:
                note = f"{NOTHING} {rule.value}"
            yield Check(f"{axis} {value} ran", not wrong and (bool(right) or not rule.must), note=note[:300])


def _drafted_check(value: str, evidence: PathEvidence) -> Check:
    """An engine that counts drafted tokens has drafted; by which method its settings say."""
    prefix = "eagle" if value.startswith("eagle") else value.split("-")[0]
    method = re.compile(rf"method='?(?:{prefix}|{value})", re.IGNORECASE)
    named = [s for s in evidence.statements if _SETTINGS.search(s)]
    right = any(map(method.search, named))
    note = f"{evidence.drafted:.0f} tokens were drafted"
    if named and not right:
        return Check(f"speculate {value} ran", False, note=f"ran instead: {named[0]}")
    return Check(f"speculate {value} ran", right, note=note if right else f"{NOTHING} {value}, though {note}")


# Naming no layer, a fallback is about experts if it names a kernel, and nothing else that falls back: engines also
# default to numbers of sequences, and ignore settings of a compiler that is off.
_NAMES_KERNEL = re.compile(
    r"kernel|backend|gemm|matmul|mxfp|fp[48]|marlin|cutlass|triton|trtllm|flashinfer|machete|offloaded", re.IGNORECASE
)
_DENSE_OR_ATTENTION = re.compile(r"attention|attn|linear|dense|sampler|tokenizer", re.IGNORECASE)
_NO_PRODUCT = re.compile(
    r"compil|inductor|graph|runner|schedul|serializ|specul|draft|\bkv\b|kv.?cache|norm|rope|all.?reduce|\bmla\b",
    re.IGNORECASE,
)


def _fallback(statement: str, rule: Rule) -> bool:
    """Whether a line says that something else runs than this rule asks for."""
    if not rule.must:
        return False
    about = bool(rule.about and re.search(rule.about, statement, re.IGNORECASE))
    if (over := _PASSED_OVER.search(statement)) and re.search(rule.must, statement[over.end() :], re.IGNORECASE):
        return about
    match = FALLBACK.search(statement)
    if match is None or re.search(rule.must, statement[match.end() :], re.IGNORECASE):
        return False
    if rule.axis != "moe_kernel":
        return about
    if _DENSE_OR_ATTENTION.search(statement):
        return False
    return about or bool(_NAMES_KERNEL.search(statement) and not _NO_PRODUCT.search(statement))


# ---- our own record --------------------------------------------------------------------------------------------------


def _by_record(
    gates: Gates, requests: Mapping[str, str], evidence: PathEvidence, traffic: Sequence[str]
) -> Iterable[Check]:
    assert evidence.record is not None
    ran = list(evidence.phases())
    differences = [str(d) for d in evidence.record.get("differences", ())]
    yield Check(
        "the chosen kernels ran", not differences and bool(ran), note="; ".join(differences)[:400] or _summary(ran)
    )
    for regime in traffic:
        fixed = "batch" if regime == "decode" and gates.deterministic == "on" else regime  # on a GPU
        yield Check(f"something ran in {regime}", any(r in (regime, fixed) for r, _ in ran))
    phases = {p.name: p for p in all_phases()}
    for name, axis in KERNEL_AXES.items():
        if name in requests:
            yield _kernel_check(gates, name, axis, ran, phases)
    if "activation" in requests:
        wrong = [
            f"{phase['phase']} ({regime}) took {phase['activation']}"
            for regime, phase in ran
            if phase["activation"]
            not in {"auto": (phase["activation"],), "float": ("bf16", "f32")}.get(
                activation := gates.activation_in(regime), (activation,)
            )
        ]
        yield Check(f"activation {gates.activation} ran", not wrong, note="; ".join(wrong)[:300])
    if "layers" in requests:
        yield _format_check(gates, ran)
    if "cpu_instructions" in requests:
        prefix = f"halfbyte_cpu.{gates.cpu_instructions}:"
        names = [k["name"] for _, phase in ran for k in phase["kernels"] if str(k["name"]).startswith("halfbyte_cpu.")]
        bad = [n for n in names if not n.startswith(prefix)]
        yield Check(f"instructions {gates.cpu_instructions} ran", bool(names) and not bad, note=", ".join(bad)[:300])
    if "graphs" in requests:
        graphs = [w for regime in ("decode", "batch") for w in evidence.ways(regime) if w.startswith("graph")]
        yield Check("no graph was replayed", not graphs, note=", ".join(graphs)[:300])
    values, others = evidence.record.get("values") or {}, {}
    for name, value in requests.items():
        if name in values:
            yield _value_check(name, value, values[name])
        elif name == "tile":
            names = [str(k["name"]) for _, phase in ran for k in phase["kernels"]]
            sizes = [n for n in names if re.search(value.replace("x", "[x_]"), n)]
            yield Check(f"tile {value} ran", bool(sizes), note=", ".join(sizes)[:300] or f"{NOTHING} it")
        elif name not in (*KERNEL_AXES, "activation", "layers", "cpu_instructions", "graphs"):
            others[name] = value
    yield from _by_names(others, evidence)  # the plugin's record has no values: vLLM's log speaks of them


def _value_check(name: str, value: str, observed: Any) -> Check:
    """A gate that chooses no kernel against the state that the engine recorded when it ended."""
    title = f"{name} {value} ran"
    if name == "speculate":
        proposer, drafted, accepted = observed["proposer"], observed["drafted"], observed["accepted"]
        if not proposer.startswith(PROPOSERS[value.partition("-")[0]]):
            return Check(title, False, note=f"ran instead: {proposer or 'no speculation'}")
        note = f"{accepted} of {drafted} drafted tokens were accepted"
        return Check(title, drafted > 0, note=note if drafted else f"{NOTHING} it: no token was drafted")
    if name == "threads":
        note = f"pools of {', '.join(map(str, observed))} threads" if observed else "the CPU kernels did not run"
        return Check(title, observed in ([], [int(value)]), note=note)
    if name == "experts_in_host" and value == "all":
        return Check(title, observed != "0", note=f"{observed} layers had their experts in host memory")
    return Check(title, value == observed, note=f"the engine had {observed}")


def _kernel_check(
    gates: Gates, name: str, axis: str, ran: Sequence[tuple[str, Mapping[str, Any]]], phases: Mapping[str, Phase]
) -> Check:
    operations = [op for op, a in AXIS.items() if a == axis]
    wrong: list[str] = []
    right: list[str] = []
    for regime, phase in ran:
        backend = gates.backend(axis, regime)
        if backend == "auto" or not set(operations) & set(phase["covers"]):
            continue
        known_phase = phases.get(phase["phase"])
        answers = known_phase.answers(axis) if known_phase and axis in known_phase.backends else _own_words(phase, axis)
        (right if backend in answers else wrong).append(f"{phase['phase']} ({regime})")
    title = f"{name} {getattr(gates, name)} ran"
    if not right and not wrong:
        named = {gates.backend(axis, regime) for regime in TRAFFIC} - {"auto"}
        if named == {"vllm"} and ran:  # the plugin records its own kernels: what none of them computed, vLLM did
            return Check(title, True, note="none of ours ran")
        return Check(title, False, note=f"{NOTHING} it: no kernel of it is in the record")
    return Check(title, not wrong, note=(f"ran instead: {', '.join(wrong)}" if wrong else ", ".join(right))[:300])


def _own_words(phase: Mapping[str, Any], axis: str) -> tuple[str, ...]:
    """A phase that this version does not know (the plugin's, inside another engine) says itself what it answers to."""
    answers = phase.get("answers", {})
    statements = answers.get(axis, ()) if isinstance(answers, Mapping) else ()
    return (
        (statements,) if isinstance(statements, str) else tuple(statements) or (str(phase["phase"]).partition(".")[0],)
    )


def _format_check(gates: Gates, ran: Sequence[tuple[str, Mapping[str, Any]]]) -> Check:
    named: dict[str, set[str]] = {}  # group -> its formats, in whichever of its layers
    for name, form in gates.layer_formats.items():
        named.setdefault(name.partition(".")[0], set()).add(form)
    asked_formats = {group: forms for group, forms in named.items() if forms != {"checkpoint"}}
    wrong, seen = [], set()
    for regime, phase in ran:
        for role, text in phase["formats"].items():
            group = GROUP.get(role)
            if group in asked_formats:
                seen.add(group)
                forms = kinds_in(text)
                if "checkpoint" in asked_formats[group]:  # some layers have the file's format, whichever that is
                    right = asked_formats[group] - {"checkpoint"} <= forms
                else:
                    right = asked_formats[group] == forms
                if not right:
                    wrong.append(f"{role} ({regime}) was {text}")
    missing = [g for g in asked_formats if g not in seen]
    note = "; ".join([*dict.fromkeys(wrong), *(f"{g} was never read" for g in missing)])
    return Check(f"layers {gates.layers} ran", not wrong and not missing, note=note[:300])


def _summary(ran: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    by_phase: dict[str, list[str]] = {}
    for regime, phase in ran:
        by_phase.setdefault(str(phase["phase"]), []).append(regime)
    return "; ".join(f"{name} ({', '.join(dict.fromkeys(rs))})" for name, rs in by_phase.items())[:400]
