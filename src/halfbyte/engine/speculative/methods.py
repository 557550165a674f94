"""From the name of a method (`--speculate`) to a proposer for a model."""

from __future__ import annotations

from halfbyte.engine.speculative.controller import Controller
from halfbyte.engine.speculative.ngram import NgramProposer
from halfbyte.engine.speculative.proposer import Proposer
from halfbyte.engine.speculative.suffix import SuffixProposer
from halfbyte.errors import UsageError
from halfbyte.model.gpt_oss import GptOss
from halfbyte.roofline import decode_traffic


class BytesRead:
    """What a step costs: the bytes it reads, by the roofline's count, for this model in its formats."""

    def __init__(self, model: GptOss) -> None:
        self._config, self._formats, self._kv = model.config, model.spec.formats, model.spec.kv_dtype
        self._known: dict[int, tuple[float, float]] = {}

    def __call__(self, rows: int, context: int) -> float:
        known = self._known.get(rows)
        if known is None:
            empty = decode_traffic(self._config, self._formats, 0, rows, self._kv).total
            far = decode_traffic(self._config, self._formats, self._config.window + 1, 1, self._kv).kv
            near = decode_traffic(self._config, self._formats, self._config.window, 1, self._kv).kv
            known = self._known[rows] = (empty, far - near)  # a token past the window is read by full layers only
        return known[0] + context * known[1]


def make_proposer(method: str, model: GptOss, draft: str | None, longest: int, max_seqs: int) -> Proposer | None:
    if method == "off":
        return None
    controller = Controller(BytesRead(model), longest=longest)
    if method == "ngram":
        return NgramProposer(controller)
    if method == "suffix":
        return SuffixProposer(controller)
    raise UsageError(f"--speculate {method} is not built yet; use ngram, suffix or off.")
