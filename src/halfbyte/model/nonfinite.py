"""NaN, Inf and matrices of zeros among the weights, detected while a model is loaded and reported with tensor and file.

One pass over each dense tensor and over the scales of each block-scaled one, where the tensor already is; nothing waits
for the result until all are read. Only suspect tensors are read a second time, to count the values or to confirm the
zeros. The codes of block formats hold no NaN, so only some of their rows are read, for zeros.

A matrix of zeros is what a download leaves that was cut short in a file of the full size, or zeros from the middle of
a matrix to the file's end. Biases, sinks and single experts of zeros are legitimate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.stored import Stored
from halfbyte.formats.tensor import MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.plain_file import MIB
from halfbyte.model.weights import LAYER_ROLES, Matrix, Source, WeightFormat

NAN_SCALE = 0xFF  # of UE8M0
COUNTED = 2  # more are only mentioned
PIECE = 1 << 20
CODES = "belongs to codes that are all zeros"
SAMPLED_ROWS = 16  # of each block-scaled matrix, looked at for zeros
MAY_BE_ZERO = ("sinks", *(role for role in LAYER_ROLES if role.endswith("_bias")))

log = logging.getLogger("halfbyte")


class FileSource(Source, Protocol):
    """A source that knows which tensor of which file a part comes from."""

    def origins(self, layer: int | None, role: str) -> Sequence[str]:
        """For each of `parts`: "FILE: tensor 'NAME'", the one with the scales if it is block-scaled."""

    def stored(self, layer: int | None, role: str) -> Stored | None:
        """The location of its rows; None where it is not stored in rows."""

    def mapped(self, layer: int | None, role: str) -> Tensor | None:
        """The tensor in its file, not read; None where it cannot stay there."""

    def forget(self, layer: int | None, role: str) -> None:
        """Drop what other readers read of its files from the page cache."""


@dataclass
class FiniteSource:
    """A source whose parts are scanned as they are read. With `at_once` a bad part is refused at once."""

    inner: FileSource
    at_once: bool = False
    _suspects: list[tuple[int | None, str, Tensor]] = field(default_factory=list)

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return self.inner.formats(layer, role)

    def nbytes(self, layer: int | None, role: str) -> int:
        return self.inner.nbytes(layer, role)

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        parts = self.inner.parts(layer, role)
        self._suspects.append((layer, role, torch.stack([_is_suspect(part, role) for part in parts]).any()))
        if self.at_once:
            self.finish(allowed=False)
        return parts

    def record_scan(self, layer: int | None, role: str, *, sound: bool) -> None:
        """Record the result for a tensor that another reader has already scanned."""
        self._suspects.append((layer, role, torch.tensor(not sound)))

    def finish(self, *, allowed: bool) -> None:
        """Refuse, or where `allowed` warn of, the values that were detected since the last call."""
        if problem := self.problem():
            refuse(problem, allowed=allowed)

    def problem(self) -> str:
        """The values that were detected since the last call, as a clause; empty if there are none."""
        scans, self._suspects = self._suspects, []
        by_device: dict[torch.device, list[Tensor]] = {}  # experts may be in host memory beside a GPU's weights
        for _, _, suspect in scans:
            by_device.setdefault(suspect.device, []).append(suspect)
        if not any(bool(torch.stack(suspects).any()) for suspects in by_device.values()):
            return ""
        suspects = [(layer, role) for layer, role, suspect in scans if bool(suspect)]
        texts: list[str] = []
        weights = 0
        while suspects and weights < COUNTED:
            problems = self._problems(*suspects.pop(0))
            texts += problems
            weights += bool(problems)
        more = f"; and {len(suspects)} further weights" if suspects else ""
        return f"{'; '.join(texts)}{more}"

    def _problems(self, layer: int | None, role: str) -> list[str]:
        problems = []
        for origin, part in zip(self.inner.origins(layer, role), self.inner.parts(layer, role)):
            n = _count(part)
            if n:
                problems.append(f"{origin} has {n} {'value that is' if n == 1 else 'values that are'} not finite")
            elif role not in MAY_BE_ZERO and (zeros := _zeros(part, role)):
                problems.append(f"{origin} {zeros}")
        return problems


def refuse(problem: str, *, allowed: bool) -> None:
    """Raise an error that names the problem and the flag that loads the model all the same; warn where `allowed`."""
    if not allowed:
        raise CheckpointError(
            f"{problem}; fetch the model again, or try it as it is with `halfbyte generate --allow-nan`."
        )
    log.warning("%s. Answers computed from them are meaningless.", problem)


def check_tails(tails: Mapping[Path, int], *, allowed: bool) -> None:
    """Refuse, or where `allowed` warn of, files that end with zeros that no weights have."""
    if problem := tail_problem(tails):
        refuse(problem, allowed=allowed)


def tail_problem(tails: Mapping[Path, int]) -> str:
    if not tails:
        return ""
    path, count = next(iter(tails.items()))
    size = f"{count >> 10} KiB" if count < 10 * MIB else f"{count // MIB} MiB"
    more = f", and so do {len(tails) - 1} further files" if len(tails) > 1 else ""
    return f"{path} ends with {size} of zeros{more}"


def _is_suspect(m: Matrix, role: str) -> Tensor:
    """A scalar on the tensor's device. Minimum and maximum of numbers with a NaN are NaN, so one reduction tells."""
    low, high = torch.aminmax(m.scales if isinstance(m, MXTensor) else m)
    if low.dtype == torch.uint8:
        suspect = high == NAN_SCALE
    else:
        suspect = ~(torch.isfinite(low) & torch.isfinite(high))
    if role in MAY_BE_ZERO:
        return suspect
    suspect = suspect | ((low == 0) & (high == 0))
    if isinstance(m, MXTensor) or role == "gate_up":
        matrices = _matrices(m.data if isinstance(m, MXTensor) else m, role)
        samples = [rows[..., :: max(1, rows.shape[-2] // SAMPLED_ROWS), :] for rows in matrices]
        suspect = suspect | ~torch.stack([sample.any() for sample in samples]).all()
    return suspect


def _matrices(rows: Tensor, role: str) -> list[Tensor]:
    """The matrices that are stored as one: gate and up, whose rows alternate."""
    return [rows[..., 0::2, :], rows[..., 1::2, :]] if role == "gate_up" else [rows]


def _zeros(m: Matrix, role: str) -> str:
    """What is zero in a weight, as the predicate of its name; empty if it has other values."""
    tensors = {"is all zeros": m} if isinstance(m, Tensor) else {"is all zeros": m.scales, CODES: m.data}
    for text, tensor in tensors.items():
        zeros = [not bool(matrix.any()) for matrix in _matrices(tensor, role)]
        if any(zeros):
            half = "" if all(zeros) else f" in the rows of {'gate' if zeros[0] else 'up'}"
            return f"{text}{half}"
    return ""


def _count(m: Matrix) -> int:
    flat = (m.scales if isinstance(m, MXTensor) else m).reshape(-1)
    nans = (
        piece == NAN_SCALE if flat.dtype == torch.uint8 else ~torch.isfinite(piece)
        for piece in torch.split(flat, PIECE)
    )
    return sum(int(torch.count_nonzero(piece)) for piece in nans)
