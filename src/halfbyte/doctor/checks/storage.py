"""Disks: whether the model is complete and sound, how fast it can be read, and the folders of compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import GIB, gib, unified, weights
from halfbyte.harmony.vocabulary import CONTROL_NAMES

CACHE_ROOM = 2 * GIB
SLOW = 500e6  # bytes/s: below it even gpt-oss-20b takes half a minute to load
FLEETING = ("overlay", "aufs", "tmpfs", "ramfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph")


def cache_root(machine: Machine) -> str:
    return machine.variables().get("HALFBYTE_CACHE_DIR") or "~/.cache/halfbyte"


def models_root(machine: Machine) -> str:
    return machine.variables().get("HALFBYTE_MODELS_DIR") or f"{cache_root(machine)}/models"


@check("model.complete", "error", "the model's files: missing or truncated shards, vocabulary")
def complete(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    files = None if purpose.model is None else machine.ask("model", purpose.model)
    if purpose.model is None or files is None:
        return
    again = (_pull(purpose),)
    if files["kind"] == "unknown":
        yield Finding(
            "error",
            f"{purpose.model} is neither a folder nor a GGUF file",
            "name the model's folder or file",
        )
        return
    if files["kind"] != "safetensors":
        return
    problems = {"missing": "are missing", "cut_off": "are truncated", "unfinished": "are incomplete downloads"}
    for problem, text in problems.items():
        if files[problem]:
            names = ", ".join(files[problem][:3]) + (" …" if len(files[problem]) > 3 else "")
            severity = "warning" if problem == "unfinished" and not files["missing"] else "error"
            yield Finding(
                severity,
                f"{len(files[problem])} files of {purpose.model} {text}: {names}",
                "pull the model again; complete files are kept",
                again,
            )
    if not files["vocabulary"]:
        yield Finding(
            "note",
            f"{purpose.model} has no tokenizer.json: halfbyte uses its own copy of gpt-oss's vocabulary, other engines "
            "cannot read the model",
            "pull the model again if other engines should read it",
            again,
        )


def contents(machine: Machine, purpose: Purpose) -> dict[str, Any]:
    """What was read in the model's files; empty if there are none or if some are incomplete."""
    files = None if purpose.model is None else machine.ask("model", purpose.model)
    if files is None or files["kind"] == "unknown" or files.get("missing") or files.get("cut_off"):
        return {}
    return dict(machine.ask("model_contents", str(purpose.model)) or {})


@check(
    "model.headers",
    "error",
    "the tensors of the model: missing layers, a config.json of another model, no model at all",
)
def headers(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    answer = contents(machine, purpose)
    if "error" in answer:
        yield Finding(
            "warning",
            f"the contents of {purpose.model} could not be checked: {answer['error']}",
            "fix the other findings first, then run the doctor again",
        )
    if answer.get("headers"):
        evidence, _, fix = answer["headers"].rpartition("; ")  # the loader's sentence ends with what to do
        commands = (_pull(purpose),) if not evidence or "fetch" in fix or "pull" in fix else ()
        yield Finding("error", evidence or fix, fix if evidence else "pull the model again", commands)


@check("model.weights", "error", "NaN, Inf and matrices of zeros among the weights (at most 60 s are spent)")
def numbers(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    answer = contents(machine, purpose)
    for problem in answer.get("weights", ()):
        yield Finding(
            "error",
            problem,
            "remove that file and pull the model again; `halfbyte serve --verify` compares all files with their hashes",
            (_pull(purpose),),
        )
    if answer.get("scanned", 0) < answer.get("bytes", 0) and not answer["weights"]:
        yield Finding(
            "note",
            f"{gib(answer['scanned'])} of the {gib(answer['bytes'])} of weights were scanned in the time there was",
            "nothing needs to be done: loading the model scans all of them",
        )


@check("model.vocabulary", "error", "whether the vocabulary is usable and has harmony's control tokens")
def vocabulary(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    answer = contents(machine, purpose)
    if answer.get("vocabulary"):
        yield Finding("error", answer["vocabulary"], "pull the model's tokenizer.json again", (_pull(purpose),))
    elif "special" in answer and (missing := [name for name in CONTROL_NAMES if name not in answer["special"]]):
        yield Finding(
            "error",
            f"the vocabulary of {purpose.model} has no {', '.join(missing)}: conversations cannot be rendered",
            "put the tokenizer.json that was published with the model into its folder",
            (_pull(purpose),),
        )


@check("model.context", "error", "whether the context of `--max-context` is one that the model has")
def context(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    most = contents(machine, purpose).get("context")
    if most is not None and purpose.max_context is not None and purpose.max_context > most:
        yield Finding(
            "error",
            f"a context of {purpose.max_context} tokens is more than {purpose.model} has: {most}",
            f"use --max-context {most} or less",
            (f"halfbyte serve {purpose.model} --max-context {most}",),
        )


def _pull(purpose: Purpose) -> str:
    return f"halfbyte pull REPOSITORY --to {purpose.model}"


@check("disk.space", "error", "disk space for a model that is yet to be pulled, and for compiled kernels")
def space(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    size = weights(machine, purpose.model)
    here = purpose.model is not None and machine.ask("model", purpose.model) is not None
    if size is not None and not here and not str(purpose.model).startswith("random:"):
        disk = machine.ask("disk", models_root(machine)) or {}
        if disk and disk["free"] < size * 1.02:
            yield Finding(
                "error",
                f"{purpose.model} takes {gib(size)}; {gib(disk['free'])} are free under {models_root(machine)}",
                "free some space, or choose another disk",
                ("export HALFBYTE_MODELS_DIR=/path/on/another/disk",),
            )
    disk = machine.ask("disk", cache_root(machine)) or {}
    if disk and disk["free"] < CACHE_ROOM:
        yield Finding(
            "warning",
            f"{gib(disk['free'])} are free under {cache_root(machine)}: compiled kernels may not fit",
            "free some space",
            ("halfbyte cache list", "halfbyte cache clear all --stale"),
        )


@check("disk.speed", "warning", "how fast the model's disk reads, past the page cache (at most 256 MiB are read)")
def speed(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    files = None if purpose.model is None else machine.ask("model", purpose.model)
    if files is None or not files.get("largest"):
        return
    folder = purpose.model if files["kind"] in ("safetensors", "folder") else None
    measured = machine.ask("read_speed", f"{folder}/{files['largest']}" if folder else str(purpose.model))
    disk = machine.ask("disk", str(purpose.model)) or {}
    if measured and measured["seconds"] > 0:
        rate = measured["bytes"] / measured["seconds"]
        if rate < SLOW:
            kind = f", a {disk['kind']} file system" if disk.get("kind") in REMOTE else ""
            yield Finding(
                "warning",
                f"{purpose.model}{kind} reads {rate / 1e6:.0f} MB/s: loading takes {files['bytes'] / rate:.0f} s or "
                "more",
                "put the model on a local NVMe disk",
                (f"rsync -a {purpose.model} /path/on/nvme/",),
            )


@check("cache.folder", "warning", "whether the kernel cache is writable and outlives the container")
def folder(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    disk, root = machine.ask("disk", cache_root(machine)) or {}, cache_root(machine)
    if not disk:
        return
    if not disk["writable"]:
        yield Finding(
            "warning",
            f"{root} is not writable: every start compiles the kernels that the wheel does not contain",
            "choose a writable folder",
            ("export HALFBYTE_CACHE_DIR=/path/that/can/be/written",),
        )
    elif machine.ask("container") is not None and disk["kind"] in FLEETING:
        yield Finding(
            "warning",
            f"{root} is on the container's own file system ({disk['kind']}): compiled kernels are lost with it",
            "mount a volume there",
            (f"docker run -v halfbyte-cache:{root.replace('~', '/root')} …",),
        )


@check("cache.stale", "warning", "compiled kernels of other sources, versions or architectures")
def stale(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    by_module: dict[str, list[dict[str, Any]]] = {}
    for entry in machine.ask("caches") or ():
        by_module.setdefault(entry["module"], []).append(entry)
    for module, entries in by_module.items():
        size, count = sum(entry["bytes"] for entry in entries), sum(entry["count"] for entry in entries)
        worst = next((entry for entry in entries if "suffix" in entry["stale"]), entries[0])
        own_cache = module in ("cpu", "cubin", "emulator", "prebuilt", "peers")  # they only take room
        yield Finding(
            "note" if own_cache else "warning",
            f"{count} stale {'entry' if count == 1 else 'entries'} ({size / 1e6:.0f} MB) in the cache of {module}, "
            f"such as {worst['name']}: {worst['stale']}",
            "clear the stale entries",
            (f"halfbyte cache clear {module} --stale",),
        )


@check("disk.swapfile", "note", "zram, which takes its pages from the same unified memory")
def swapfile(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not unified(machine):
        return
    zram = [name for name in machine.folder("/sys/block") if name.startswith("zram")]
    sizes = [int((machine.file(f"/sys/block/{name}/disksize") or "0").strip() or 0) for name in zram]
    if any(sizes):
        yield Finding(
            "note",
            f"zram holds up to {gib(sum(sizes))} of compressed pages in the memory that the model needs",
            "disable it",
            ("sudo systemctl disable --now zramswap",),
        )
