"""Level 1: does the engine start, answer and end, with the gates that are checked and with the baseline?

Ready means healthy and a first token within the limit. Its log must show no failure that is known, and its end must
leave no process. Whether the answers are right is level 2's.
"""

from __future__ import annotations

from halfbyte.gates import Gates
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers import signatures
from halfbyte.lab.peers.asker import Question
from halfbyte.lab.peers.process import PeerProcess, status_text
from halfbyte.lab.result import Check, Result, figure

PROMPT, TOKENS = "The quick brown fox", 8


def check_smoke(subject: Subject) -> list[Result]:
    """With the feature, then without it; once where both are the same."""
    sides = {"with the feature": subject.gates, "baseline": subject.baseline}
    if subject.gates == subject.baseline or not subject.peer.launch(subject.setup).command:
        sides.pop("baseline")
    return [smoke(subject, gates, side) for side, gates in sides.items()]


def smoke(subject: Subject, gates: Gates, side: str) -> Result:
    cell = subject.cell("smoke", gates, case=side)
    engine = subject.process(f"smoke, {side}", gates)
    checks: list[Check] = []

    def start_and_ask() -> None:
        with engine:
            first, limit = engine.startup.first_token_s, subject.limits.start_s
            checks.append(Check("ready in time", first <= limit, round(first, 2), limit, "seconds to a first token"))
            reply = engine.asker.ask(Question(PROMPT, tokens=TOKENS, exactly=True))
            checks.append(Check("it answers", bool(reply.text), reply.completion_tokens, note=repr(reply.text)[:120]))

    if failure := subject.attempt(cell, engine, start_and_ask, checks):
        return failure
    checks += ending_checks(engine)
    detail = {"log": str(engine.log), "healthy_s": engine.startup.healthy_s, "version": engine.version}
    return subject.judged(cell, engine, checks, [figure("start", "s", engine.startup.first_token_s)], detail)


def ending_checks(engine: PeerProcess) -> list[Check]:
    """Checks of an engine that we started and asked to end."""
    if engine.launch.url:
        return []
    e = engine.ending
    findings = signatures.find(engine.log.read_text(encoding="utf-8", errors="replace").splitlines())
    return [
        Check("no known failure in its log", not findings, len(findings), 0, "; ".join(map(str, findings))[:400]),
        Check("it ends when it is asked", e.how == "asked to end", note=f"{e.how}, {status_text(e.exit)}"),
        Check("no process is left", not e.left and not e.stuck, len(e.left), 0, "; ".join((*e.left, *e.stuck))[:400]),
    ]
