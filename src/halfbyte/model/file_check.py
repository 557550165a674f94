"""Reads a model's files for the doctor and prints what is wrong as JSON: `python -m halfbyte.model.file_check MODEL S`.

A process of its own, because the doctor imports no torch and must outlive a file that ends its reader. Headers and
vocabulary are checked as for loading; weights are scanned for NaN, Inf and zeros for at most S seconds, and nothing is
kept of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from halfbyte.errors import HalfbyteError
from halfbyte.model.checkpoint import CheckpointSource, open_model
from halfbyte.model.nonfinite import FiniteSource, tail_problem
from halfbyte.model.weights import roles

MAX_PROBLEMS = 3  # scanning ends with the third


def check_files(path: str, seconds: float) -> dict[str, Any]:
    """Facts and problems, each problem as a clause. Problems of the headers leave no other facts."""
    try:
        source = open_model(path)
    except HalfbyteError as e:
        return {"headers": _clause(e)}
    with contextlib.closing(source):
        answer: dict[str, Any] = {"headers": None, "context": source.config.max_context}
        try:
            answer |= {"vocabulary": None, "special": sorted(source.tokenizer().special)}
        except HalfbyteError as e:
            answer |= {"vocabulary": _clause(e), "special": []}
        return answer | _scan(source, seconds)


def _scan(source: CheckpointSource, seconds: float) -> dict[str, Any]:
    end = time.monotonic() + seconds
    finite = FiniteSource(source)
    weights = list(roles(source.config))
    problems = [text for text in (tail_problem(source.reading.zero_tails),) if text]
    scanned = 0
    for layer, role in weights:
        if time.monotonic() > end or len(problems) >= MAX_PROBLEMS:
            break
        try:
            finite.parts(layer, role)
            problem = finite.problem()
        except HalfbyteError as e:  # a disk that does not read
            problem = _clause(e)
        scanned += source.nbytes(layer, role)
        problems += [problem] if problem else []
    return {"weights": problems, "scanned": scanned, "bytes": sum(source.nbytes(*weight) for weight in weights)}


def _clause(e: HalfbyteError) -> str:
    return str(e).removesuffix(".")


if __name__ == "__main__":
    print(json.dumps(check_files(sys.argv[1], float(sys.argv[2]))))
