"""Drafts between a commit and the next schedule: request them, and learn from how much was accepted."""

from __future__ import annotations

from halfbyte.engine.scheduled_step import ScheduledStep
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.proposer import Proposer


def propose(proposer: Proposer, running: list[Sequence]) -> None:
    """Request a draft for every sequence that decodes and for which a draft is expected to be worth its cost."""
    wants = []
    rows, context = len(running), sum(s.num_scheduled_tokens for s in running)
    for seq in running:
        if seq.grammar is not None and seq.grammar.job is not None:
            continue  # its draft is being checked against its grammar
        seq.draft, seq.proposal = [], None
        if seq.pace is None or seq.num_steps_in_flight or len(seq.tokens) - seq.num_scheduled_tokens != 1:
            continue
        most = min(seq.pace.length(len(running), rows, context), seq.max_length - len(seq.tokens) - 1)
        seq.update_run_ahead()
        if most > 0:
            wants.append((seq, most))
            rows += most
    if not wants:
        return
    for (seq, most), proposal in zip(wants, proposer.propose(wants)):
        draft = proposal.tokens[:most]
        if seq.reasoning is not None:
            draft = seq.reasoning.trim(draft)
        if seq.grammar is not None:
            draft = seq.grammar.trim(seq.tokens, draft)
        seq.draft = draft
        if proposal.probabilities is not None and seq.params.temperature != 0.0:
            seq.proposal = proposal.probabilities
        assert seq.pace is not None
        seq.pace.paid(proposal.cost)
        if not draft:
            seq.pace.nothing()


def record_time(proposer: Proposer, step: ScheduledStep, tokens: int, seconds: float, *, suspended: bool) -> None:
    """Record how long a step took, if no prompt was in it. `suspended`: speculation was when it was launched."""
    ledger, drafted = proposer.controller.ledger, False
    if ledger is None or not tokens:
        return
    for chunk in step.chunks:
        if chunk.count != 1 + len(chunk.draft):
            return
        drafted = drafted or bool(chunk.draft)
    ledger.add(len(step.chunks), tokens, seconds, drafted=drafted, suspended=suspended)


def learn(seq: Sequence, draft: list[int], new: list[int], *, ended: bool) -> int:
    """Record that `draft` led to the tokens `new`; returns how many of its tokens were accepted."""
    accepted = sum(1 for a, b in zip(draft, new) if a == b)
    seq.num_drafted_tokens += len(draft)
    seq.num_accepted_tokens += accepted
    seq.draft, seq.proposal = [], None
    if seq.pace is not None and not ended:
        seq.pace.learned(len(draft), accepted)
    return accepted
