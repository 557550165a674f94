"""Drafts between a commit and the next schedule: who gets one, and what was learned from the last."""

from __future__ import annotations

from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.proposer import Proposer


def propose(proposer: Proposer, running: list[Sequence]) -> None:
    """Ask for a draft for every sequence that decodes and whose pace says that a draft is worth its cost."""
    wants = []
    rows, context = len(running), sum(s.scheduled for s in running)
    for seq in running:
        if seq.grammar is not None and seq.grammar.job is not None:
            continue  # its draft is being held against its grammar
        seq.draft, seq.proposal = [], None
        if seq.pace is None or seq.inflight or len(seq.tokens) - seq.scheduled != 1:
            continue
        most = min(seq.pace.length(len(running), rows, context), seq.limit - len(seq.tokens) - 1)
        seq.runs_ahead = seq.may_run_ahead and seq.pace.resting
        if most > 0:
            wants.append((seq, most))
            rows += most
    if not wants:
        return
    for (seq, most), proposal in zip(wants, proposer.propose(wants)):
        draft = proposal.tokens[:most]
        if seq.grammar is not None:
            draft = seq.grammar.trim(seq.tokens, draft)
        seq.draft = draft
        if proposal.probabilities is not None and seq.params.temperature != 0.0:
            seq.proposal = proposal.probabilities
        assert seq.pace is not None
        seq.pace.paid(proposal.cost)
        if not draft:
            seq.pace.nothing()


def learn(seq: Sequence, draft: list[int], new: list[int], *, ended: bool) -> int:
    """`new` is what came of `draft`; returns how many of its tokens were accepted."""
    accepted = sum(1 for a, b in zip(draft, new) if a == b)
    seq.drafted += len(draft)
    seq.accepted += accepted
    seq.draft, seq.proposal = [], None
    if seq.pace is not None and not ended:
        seq.pace.learned(len(draft), accepted)
    return accepted
