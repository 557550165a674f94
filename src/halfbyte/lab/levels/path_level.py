"""Level 1.5 as it is run: an engine is given work of every regime, ended, and what it ran is held against its gates."""

from __future__ import annotations

from halfbyte.errors import AskError, PeerDiedError, PeerRefusedError
from halfbyte.gates import Gates
from halfbyte.lab.levels.kernel_path import Evidence, judge
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Asker, Question
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Result

# Rows of a step: a prompt of so many tokens is batch or prefill on every architecture, and each further token decode.
REGIMES = {"batch": 24, "prefill": 300}
TRAFFIC = ("decode", *REGIMES)
TOKENS = 4


def exercise(asker: Asker) -> None:
    """Work of every regime."""
    for i, rows in enumerate(REGIMES.values()):
        asker.ask(Question([5 + (i + 7 * j) % 200 for j in range(rows)], tokens=TOKENS, exactly=True))


def check_path(subject: Subject, gates: Gates | None = None) -> Result:
    gates = subject.gates if gates is None else gates
    cell = subject.cell("kernel path", gates)
    engine = subject.process("kernel path", gates)
    try:
        with engine:
            exercise(engine.asker)
    except PeerRefusedError as e:
        return Result(cell, refused=str(e))
    except PeerDiedError as e:
        return subject.failed(cell, engine, e)
    except AskError as e:
        return subject.failed(cell, engine, engine.failure(f"{subject.peer.name} did not answer: {e}"))
    checks, evidence = path_checks(subject, engine, gates)
    detail = {"observed": evidence.observed[:60], "witness": witness(evidence)}
    record = (evidence.record or {}).get("record")
    return subject.judged(cell, engine, checks, detail=detail, record=record)


def path_checks(subject: Subject, ended: PeerProcess, gates: Gates) -> tuple[list[Check], Evidence]:
    """Of an engine that has ended, whatever it was asked meanwhile."""
    evidence = subject.evidence(ended)
    if ended.launch.record is not None and evidence.record is None:
        return [
            Check("it says which kernels ran", False, note="the engine left no record: it did not end well")
        ], evidence
    traffic = TRAFFIC if evidence.record is not None and subject.peer.name == "halfbyte" else ()
    return judge(gates, evidence, traffic), evidence


def witness(evidence: Evidence) -> str:
    if evidence.record is not None:
        return "record"
    return "trace" if evidence.kernels else "log" if evidence.statements else "none"
