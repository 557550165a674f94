"""What is worth knowing about an engine that crashed or hung, gathered into one folder while it can still be seen.

    server_log.txt   all that it said               exit.json          exit status, how it ended, its command
    causes.md        known failures in that log     requests.jsonl     the last requests and what became of them
    kernel_log.txt   the kernel's last messages     gpu.txt, memory.json   state of GPU and memory
    processes.txt    its processes                  environment.json   its variables, without secrets

Whatever cannot be read leaves its reason in its file: a probe that fails costs no other. Nothing of other users'
processes is written down.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from halfbyte.lab.peers import signatures
from halfbyte.lab.peers.asker import PastRequest
from halfbyte.lab.peers.signatures import LogFinding

COMMAND_S = 10.0
KERNEL_LINES = 400
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SESSION", re.IGNORECASE)
_IN_URL = re.compile(r"(\w+://)[^/@\s]+@")
_IN_FLAG = re.compile(r"(--?[\w-]*(?:key|token|secret|password)[\w-]*)(=|\s+)\S+", re.IGNORECASE)


@dataclass
class Case:
    """What the process that watched the engine knows of it."""

    why: str
    log: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    ending: Mapping[str, Any] = field(default_factory=dict)
    processes: Sequence[str] = ()  # as last seen
    requests: Iterable[PastRequest] = ()
    api_log: Path | None = None


def collect(case: Case, folder: Path) -> list[LogFinding]:
    """Writes the folder; the known causes that the engine's log shows."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _read(case.log)
    findings = signatures.find(text.splitlines())
    kernel = kernel_messages()
    findings += [
        f for f in signatures.find(kernel.splitlines()) if f.signature.name not in {g.signature.name for g in findings}
    ]
    command = " ".join(case.command)
    writes: dict[str, Callable[[], str]] = {
        "server_log.txt": lambda: without_secrets(text),
        "exit.json": lambda: _json({"why": case.why, "command": without_secrets(command), **case.ending}),
        "causes.md": lambda: causes(case.why, findings),
        "requests.jsonl": lambda: "".join(json.dumps(asdict(r)) + "\n" for r in case.requests),
        "kernel_log.txt": lambda: kernel,
        "gpu.txt": gpu_state,
        "memory.json": lambda: _json(memory_state()),
        "processes.txt": lambda: "\n".join(case.processes) or "none was seen",
        "environment.json": lambda: _json(safe_environment(case.environment)),
    }
    for name, make in writes.items():
        try:
            body = make()
        except Exception as e:  # a probe must not cost the others
            body = f"could not be gathered: {type(e).__name__}: {e}"
        (folder / name).write_text(body + ("" if body.endswith("\n") else "\n"), encoding="utf-8")
    if case.api_log is not None and case.api_log.is_file():
        shutil.copyfile(case.api_log, folder / case.api_log.name)
    return findings


def causes(why: str, findings: Sequence[LogFinding]) -> str:
    lines = [f"# {why}", ""]
    for finding in findings:
        s = finding.signature
        lines += [
            f"## {s.name}",
            "",
            f"- line {finding.number}: `{finding.line}`",
            f"- cause: {s.cause}",
            f"- fix: {s.fix}",
            "",
        ]
    if not findings:
        lines += ["The log shows no failure that is known here; its last lines are in server_log.txt.", ""]
    return "\n".join(lines)


def kernel_messages() -> str:
    """The end of the kernel's log: Xid errors, and processes that were killed for their memory."""
    return (
        _output(["dmesg", "--ctime"], KERNEL_LINES) or _output(["dmesg"], KERNEL_LINES) or "the kernel's log is empty"
    )


def gpu_state() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi on this machine"
    return _output(["nvidia-smi", "-q", "-d", "MEMORY,UTILIZATION,CLOCK,PERFORMANCE,POWER,TEMPERATURE"], 400)


def memory_state() -> dict[str, Any]:
    pressure = Path("/proc/pressure/memory")
    return {
        "memory": dict(psutil.virtual_memory()._asdict()),
        "swap": dict(psutil.swap_memory()._asdict()),
        "pressure": pressure.read_text(encoding="utf-8").splitlines() if pressure.is_file() else None,
    }


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(left out)" if _SECRET.search(name) else without_secrets(value)
        for name, value in sorted(environment.items())
    }


def without_secrets(text: str) -> str:
    """Passwords in addresses and the values of flags that are named like keys are left out."""
    return _IN_FLAG.sub(r"\1\2(left out)", _IN_URL.sub(r"\1(left out)@", text))


def _output(command: Sequence[str], lines: int) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError) as e:
        return f"{command[0]} could not be asked: {type(e).__name__}: {e}"
    if ran.returncode:
        return f"{command[0]} could not be asked: {ran.stderr.strip()[:300]}"
    return "\n".join(ran.stdout.splitlines()[-lines:])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        return f"the log could not be read: {e}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str)
