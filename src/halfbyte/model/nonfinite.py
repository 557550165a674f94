"""Weights that are no numbers, found while a model is loaded and named with their file.

One pass over each dense tensor and over the scales of each block-scaled one, where the tensor already is; nothing waits
for the result until all are read. Only what was found is read a second time, to count it. The codes of block formats
hold no NaN, so they are not looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.stored import Stored
from halfbyte.formats.tensor import MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.weights import Matrix, Source, WeightFormat

NAN_SCALE = 0xFF  # of UE8M0
COUNTED = 2  # more are only mentioned
PIECE = 1 << 20

log = logging.getLogger("halfbyte")


class FileSource(Source, Protocol):
    """A source that knows which tensor of which file a part comes from."""

    def origins(self, layer: int | None, role: str) -> Sequence[str]:
        """For each of `parts`: "FILE: tensor 'NAME'", the one with the scales if it is block-scaled."""

    def stored(self, layer: int | None, role: str) -> Stored | None:
        """Where its rows lie; None where they do not lie in rows."""

    def mapped(self, layer: int | None, role: str) -> Tensor | None:
        """The tensor in its file, not read; None where it cannot stay there."""

    def forget(self, layer: int | None, role: str) -> None:
        """What others read of its files need not stay in the page cache."""


@dataclass
class FiniteSource:
    """A source whose parts are looked at as they pass. `at_once`: refuse before the next is handed out."""

    inner: FileSource
    at_once: bool = False
    _bad: list[tuple[int | None, str, Tensor]] = field(default_factory=list)

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return self.inner.formats(layer, role)

    def nbytes(self, layer: int | None, role: str) -> int:
        return self.inner.nbytes(layer, role)

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        parts = self.inner.parts(layer, role)
        self._bad.append((layer, role, torch.stack([_is_bad(part) for part in parts]).any()))
        if self.at_once:
            self.finish(allowed=False)
        return parts

    def seen(self, layer: int | None, role: str, *, finite: bool) -> None:
        """Of a tensor that somebody else read and looked at."""
        self._bad.append((layer, role, torch.tensor(not finite)))

    def finish(self, *, allowed: bool) -> None:
        """Refuse what was found since the last time, or only warn."""
        seen, self._bad = self._bad, []
        if not seen or not bool(torch.stack([bad for _, _, bad in seen]).any()):
            return
        found = [(layer, role) for layer, role, bad in seen if bool(bad)]
        texts = [text for layer, role in found[:COUNTED] for text in self._counts(layer, role)]
        more = f"; and {len(found) - COUNTED} further weights" if len(found) > COUNTED else ""
        problem = f"{'; '.join(texts)}{more}"
        if not allowed:
            raise CheckpointError(
                f"{problem}; fetch the model again, or look at what it says with `halfbyte generate --allow-nan`."
            )
        log.warning("%s. Answers that they reach are no answers.", problem)

    def _counts(self, layer: int | None, role: str) -> list[str]:
        parts, origins = self.inner.parts(layer, role), self.inner.origins(layer, role)
        counts = zip(origins, [_count(part) for part in parts])
        return [
            f"{origin} has {n} {'value that is' if n == 1 else 'values that are'} no finite number"
            for origin, n in counts
            if n
        ]


def _is_bad(m: Matrix) -> Tensor:
    """A scalar on the tensor's device. Minimum and maximum of numbers with a NaN are NaN, so one reduction tells."""
    if isinstance(m, MXTensor) and m.scales.dtype == torch.uint8:
        return m.scales.amax() == NAN_SCALE
    low, high = torch.aminmax(m.scales if isinstance(m, MXTensor) else m)
    return ~(torch.isfinite(low) & torch.isfinite(high))


def _count(m: Matrix) -> int:
    flat = (m.scales if isinstance(m, MXTensor) else m).reshape(-1)
    nans = (
        piece == NAN_SCALE if flat.dtype == torch.uint8 else ~torch.isfinite(piece)
        for piece in torch.split(flat, PIECE)
    )
    return sum(int(torch.count_nonzero(piece)) for piece in nans)
