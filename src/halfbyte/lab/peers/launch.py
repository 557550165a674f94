"""What engines have in common before they run: what is asked of one, and its command and environment, or why not.

A `Peer` turns a `Setup` (model, gates, port) into a `Launch`: its own flags and variables, or the reasons why it cannot
run these gates. It starts nothing; `process.py` does. Gates that an engine has no equivalent of are refused, never
dropped.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from halfbyte.errors import UsageError
from halfbyte.gates import AXES, Gates

Progress = Callable[[str], None]
# What shows which kernel failed, and when; at a price, so never while something is timed.
DEBUG = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "NCCL_DEBUG": "INFO",
    "FLASHINFER_LOGLEVEL": "3",
    "FLASHINFER_JIT_VERBOSE": "1",
}
API_LOG = "flashinfer_api.log"  # in the engine's folder, with --debug


@dataclass(frozen=True)
class Setup:
    """An engine as it should be started. `flags` are its own, passed on as they are."""

    model: str | None  # a folder, a .gguf file, random:20b; None: the embedded model
    gates: Gates = field(default_factory=Gates)
    device: str | None = None
    port: int = 0
    folder: Path = Path()  # of this run: logs, and what the engine leaves there
    flags: tuple[str, ...] = ()
    file: str | None = None  # the model as this engine reads it, where that is another file
    python: str | None = None  # of an engine that lives in an environment of its own
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its own, passed on as they are


@dataclass(frozen=True)
class Launch:
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    health: str = "/health"
    record: Path | None = None  # where the engine says which kernels ran, once it has ended
    renders_chat: bool = True  # False: it cannot render conversations of this model (no template, another vocabulary)
    dialect: str = "openai"  # how it is asked; llama.cpp names tokens by an API of its own
    url: str = ""  # of an engine that runs already: nothing is started then


class Peer(Protocol):
    """An engine that can be started, asked and stopped."""

    @property
    def name(self) -> str: ...

    def prepare(self, setup: Setup, progress: Progress) -> Setup:
        """Makes what a start needs and takes long: a build, another form of the weights. Once for many starts."""
        ...

    def launch(self, setup: Setup) -> Launch:
        """Never starts anything, and is cheap: a matrix asks for hundreds."""
        ...


def refused(gates: Gates, fields: Iterable[str], engine: str, reasons: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each axis that differs from its default and that the engine does not know."""
    flags = {axis.field: axis.flag for axis in AXES}
    fields = set(fields)
    sentences = []
    for name, value in gates.changes().items():
        if name not in fields and (name, value) != ("layers", "checkpoint"):  # other engines hold what the file has
            why = (reasons or {}).get(name, f"{engine} has no such choice")
            sentences.append(f"{flags[name]} {value}: {why}.")
    return sentences


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def variables(assignments: Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE` each, as somebody typed them for an engine."""
    values = {}
    for word in assignments:
        name, sign, value = word.partition("=")
        if not sign or not name.isidentifier():
            raise UsageError(f"a variable of an engine looks like NAME=VALUE, not {word!r}.")
        values[name] = value
    return values
