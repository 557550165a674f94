"""Level 1.5: did the kernels run that the gates ask for? Must-see and must-not-see, by gate, from what an engine shows.

Three witnesses, the best that there is: the record that halfbyte or its plugin writes when it ends (which phases,
kernels, formats and activations ran, and everything that ran otherwise than chosen), the names of kernels in a
profiler's trace (torch's JSON, or an nsys export), and the lines of an engine's log that say what it uses. Of a list of
what it could have used nothing is believed. A gate that is asked for and that no witness speaks of is not proven, and
counts as failed: a figure of such a cell is INVALID. Nothing is started here.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.gates import LAYER_GROUPS, Gates
from halfbyte.lab.result import Check
from halfbyte.plan.phase import AXIS, GROUP, Phase
from halfbyte.plan.select import all_phases

KERNEL_AXES = {"moe_kernel": "moe", "linear_kernel": "linear", "attention": "attention"}


@dataclass(frozen=True)
class Evidence:
    """What a witness says. `record` is the document of `engine/record_file.py`, or the plugin's in the same form."""

    record: Mapping[str, Any] | None = None
    statements: tuple[str, ...] = ()  # lines of a log that say what is used
    kernels: tuple[str, ...] = ()  # names in a trace

    @property
    def silent(self) -> bool:
        return self.record is None and not self.statements and not self.kernels

    @property
    def observed(self) -> list[str]:
        """For people: what ran, once each."""
        names = [k for _, phase in self.phases() for k in (f"{phase['phase']}: {_names(phase)}",)]
        return list(dict.fromkeys([*names, *self.kernels, *self.statements]))

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


# ---- reading witnesses -----------------------------------------------------------------------------------------------

# Only what a line says it uses; what follows "out of" is what it might have used.
_SAYS = re.compile(
    r"\b(using|selected|enabled|will use|chose|capturing|captured|running with|llama_kv_cache: size)\b", re.IGNORECASE
)
_MIGHT = re.compile(
    r"\bout of\b|\bpotential\b|\bavailable\b|\bsupported\b.*:|\bcandidates?\b|\bnot using\b", re.IGNORECASE
)


def read_log(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as e:
        raise UsageError(f"the log {path} cannot be read ({e.strerror or e}).") from None
    said = []
    for line in lines:
        kept = _MIGHT.split(line)[0]
        if _SAYS.search(kept):
            said.append(kept.strip()[:300])
    return tuple(dict.fromkeys(said))


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


def read_trace(path: Path) -> tuple[str, ...]:
    """Names of the kernels in a torch trace (.json, .json.gz) or an nsys export (.sqlite)."""
    try:
        if path.suffix == ".sqlite":
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
                rows = db.execute(
                    "SELECT DISTINCT s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k "
                    "JOIN StringIds s ON s.id = k.demangledName"
                )
                return tuple(str(row[0]) for row in rows)
        raw = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        events = raw["traceEvents"] if isinstance(raw, dict) else raw
        return tuple(dict.fromkeys(str(e["name"]) for e in events if e.get("cat") == "kernel"))
    except (OSError, ValueError, LookupError, TypeError, sqlite3.Error) as e:
        raise UsageError(f"{path} is neither torch's trace nor an nsys export ({type(e).__name__}: {e}).") from None


# ---- rules for names and lines ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What a gate's value must show, and must not, in the names of kernels or the statements of a log."""

    axis: str
    value: str
    must: str = ""
    must_not: str = ""
    about: str = ""  # only statements that speak of this; names of kernels speak for themselves


_MOE, _ATTENTION = r"moe|expert|mxfp4", r"attention|attn"
RULES: tuple[Rule, ...] = (
    Rule("moe_kernel", "marlin", r"marlin", r"cutlass|triton|trtllm", _MOE),
    Rule("moe_kernel", "cutlass", r"cutlass", r"marlin|triton", _MOE),
    Rule("moe_kernel", "triton", r"triton|matmul_ogs", r"marlin|cutlass", _MOE),
    Rule("moe_kernel", "gemv", r"gemv|gemm fallback|decode_step", "", _MOE),
    Rule("linear_kernel", "marlin", r"marlin", "", r"linear|qkv|dense|mxfp4"),
    Rule("activation", "mxfp8", r"mxfp8", "", r"quant|activation|moe|mxfp"),
    Rule("activation", "fp8", r"fp8|e4m3", "", r"quant|activation|moe"),
    Rule("attention", "triton", r"triton", r"flashinfer|flash_attn", _ATTENTION),
    Rule("attention", "flashinfer", r"flashinfer", r"triton_attn|flash_attn", _ATTENTION),
    Rule("kv_dtype", "fp8", r"fp8", "", r"kv|cache"),
    Rule("kv_dtype", "bf16", r"\bk \(bf16\).* v \(bf16\)", r"\b[kv] \((?!bf16)", r"llama_kv_cache"),
    Rule("kv_dtype", "f32", r"\bk \(f32\).* v \(f32\)", r"\b[kv] \((?!f32)", r"llama_kv_cache"),
    Rule("speculate", "ngram", r"n-?gram", "", r"specul|draft|n-?gram"),
    Rule("speculate", "eagle3", r"eagle", "", r"specul|draft|eagle"),
    Rule("graphs", "off", "", r"capturing.*graph|graph.*captur", ""),
)
# Gates whose effect no kernel's name shows: they are the model's or the host's affair, and level 2 and 3 judge them.
UNSEEN = ("sinks", "threads", "tile", "layers", "cpu_instructions")


def judge(gates: Gates, evidence: Evidence, traffic: Sequence[str] = ("decode", "prefill")) -> list[Check]:
    """A check for every gate that was asked for. Without a witness of any kind there is one, and it fails."""
    asked = {name: value for name, value in gates.changes().items() if value not in ("auto", "checkpoint")}
    if evidence.record is not None:
        return [*_by_record(gates, asked, evidence, traffic)]
    if evidence.silent:
        if not asked:
            return []
        return [Check("something says which kernels ran", False, note="neither a record, nor a log, nor a trace does")]
    return [*_by_names(asked, evidence)]


def _by_names(asked: Mapping[str, str], evidence: Evidence) -> Iterable[Check]:
    for axis, value in asked.items():
        rules = [r for r in RULES if r.axis == axis and (r.value == value or value.startswith(f"{r.value}-"))]
        if not rules:
            if axis not in UNSEEN:
                yield Check(f"{axis} {value} ran", False, note="no rule says what it would show in a log or a trace")
            continue
        for rule in rules:
            lines = [s for s in evidence.statements if not rule.about or re.search(rule.about, s, re.IGNORECASE)]
            seen = [*evidence.kernels, *lines]
            wrong = [s for s in seen if rule.must_not and re.search(rule.must_not, s, re.IGNORECASE)]
            right = [s for s in seen if rule.must and re.search(rule.must, s, re.IGNORECASE)]
            note = f"must not be seen: {wrong[0]}" if wrong else f"seen: {right[0]}" if right else ""
            if rule.must and not right and not wrong:
                note = f"nothing shows {rule.must}"
            yield Check(f"{axis} {value} ran", not wrong and (bool(right) or not rule.must), note=note[:300])


# ---- our own record --------------------------------------------------------------------------------------------------


def _by_record(gates: Gates, asked: Mapping[str, str], evidence: Evidence, traffic: Sequence[str]) -> Iterable[Check]:
    assert evidence.record is not None
    ran = list(evidence.phases())
    differences = [str(d) for d in evidence.record.get("differences", ())]
    yield Check(
        "the chosen kernels ran", not differences and bool(ran), note="; ".join(differences)[:400] or _summary(ran)
    )
    for regime in traffic:
        yield Check(f"something ran in {regime}", any(r == regime for r, _ in ran))
    known = {p.name: p for p in all_phases()}
    for name, axis in KERNEL_AXES.items():
        if name in asked:
            yield _kernel_check(gates, name, axis, ran, known)
    if "activation" in asked:
        wrong = [
            f"{phase['phase']} ({regime}) took {phase['activation']}"
            for regime, phase in ran
            if gates.activation_in(regime) not in ("auto", phase["activation"])
        ]
        yield Check(f"activation {gates.activation} ran", not wrong, note="; ".join(wrong)[:300])
    if "layers" in asked:
        yield _format_check(gates, ran)
    if "cpu_instructions" in asked:
        wanted = f"halfbyte_cpu.{gates.cpu_instructions}:"
        names = [k["name"] for _, phase in ran for k in phase["kernels"] if str(k["name"]).startswith("halfbyte_cpu.")]
        bad = [n for n in names if not n.startswith(wanted)]
        yield Check(f"instructions {gates.cpu_instructions} ran", bool(names) and not bad, note=", ".join(bad)[:300])
    if "graphs" in asked:
        graphs = [w for regime in ("decode", "batch") for w in evidence.ways(regime) if w.startswith("graph")]
        yield Check("no graph was replayed", not graphs, note=", ".join(graphs)[:300])


def _kernel_check(
    gates: Gates, name: str, axis: str, ran: Sequence[tuple[str, Mapping[str, Any]]], known: Mapping[str, Phase]
) -> Check:
    operations = [op for op, a in AXIS.items() if a == axis]
    wrong: list[str] = []
    right: list[str] = []
    for regime, phase in ran:
        wanted = gates.backend(axis, regime)
        if wanted == "auto" or not set(operations) & set(phase["covers"]):
            continue
        known_phase = known.get(phase["phase"])
        answers = known_phase.answers(axis) if known_phase and axis in known_phase.backends else _own_words(phase, axis)
        (right if wanted in answers else wrong).append(f"{phase['phase']} ({regime})")
    value = getattr(gates, name)
    note = f"ran instead: {', '.join(wrong)}" if wrong else ", ".join(right)
    return Check(f"{name} {value} ran", bool(right) and not wrong, note=note[:300])


def _own_words(phase: Mapping[str, Any], axis: str) -> tuple[str, ...]:
    """A phase that this version does not know (the plugin's, inside another engine) says itself what it answers to."""
    answers = phase.get("answers", {})
    said = answers.get(axis, ()) if isinstance(answers, Mapping) else ()
    return (said,) if isinstance(said, str) else tuple(said) or (str(phase["phase"]).partition(".")[0],)


def _format_check(gates: Gates, ran: Sequence[tuple[str, Mapping[str, Any]]]) -> Check:
    wanted = {group: f for group, f in zip(LAYER_GROUPS, gates.layers) if f != "checkpoint"}
    wrong, seen = [], set()
    for regime, phase in ran:
        for role, found in phase["formats"].items():
            group = GROUP.get(role)
            if group in wanted:
                seen.add(group)
                if found != wanted[group]:
                    wrong.append(f"{role} ({regime}) was {found}")
    missing = [g for g in wanted if g not in seen]
    note = "; ".join([*dict.fromkeys(wrong), *(f"{g} was never read" for g in missing)])
    return Check(f"layers {gates.layers} ran", not wrong and not missing, note=note[:300])


def _summary(ran: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    by_phase: dict[str, list[str]] = {}
    for regime, phase in ran:
        by_phase.setdefault(str(phase["phase"]), []).append(regime)
    return "; ".join(f"{name} ({', '.join(dict.fromkeys(rs))})" for name, rs in by_phase.items())[:400]
