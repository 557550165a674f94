"""Disks: whether the model is whole and how fast it can be read, and the folders in which compiled kernels are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halfbyte.doctor.finding import Finding, Purpose, check
from halfbyte.doctor.machine import Machine
from halfbyte.doctor.reading import GIB, gib, unified, weights

CACHE_ROOM = 2 * GIB
SLOW = 500e6  # bytes/s: below it even gpt-oss-20b takes half a minute to load
FLEETING = ("overlay", "aufs", "tmpfs", "ramfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph")


def cache_root(machine: Machine) -> str:
    return machine.variables().get("HALFBYTE_CACHE_DIR") or "~/.cache/halfbyte"


def models_root(machine: Machine) -> str:
    return machine.variables().get("HALFBYTE_MODELS_DIR") or f"{cache_root(machine)}/models"


@check("model.complete", "error", "the model's files: shards that the index names, cut-off files, config, vocabulary")
def complete(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found = None if purpose.model is None else machine.ask("model", purpose.model)
    if purpose.model is None or found is None:
        return
    again = (f"halfbyte pull REPOSITORY --to {purpose.model}",)
    if found["kind"] == "unknown":
        yield Finding(
            "error",
            f"{purpose.model} is neither a folder with safetensors files nor a GGUF file",
            "name the model's folder or file",
        )
        return
    if found["kind"] != "safetensors":
        return
    for what, said in (("missing", "are missing"), ("cut_off", "end too early"), ("unfinished", "are not finished")):
        if found[what]:
            names = ", ".join(found[what][:3]) + (" …" if len(found[what]) > 3 else "")
            severity = "warning" if what == "unfinished" and not found["missing"] else "error"
            yield Finding(
                severity, f"{len(found[what])} files of {purpose.model} {said}: {names}", "pull the model again: what "
                "is whole stays", again,
            )  # fmt: skip
    if not found["config"]:
        yield Finding("error", f"{purpose.model} has no config.json", "pull the model again", again)
    if not found["vocabulary"]:
        yield Finding(
            "note",
            f"{purpose.model} has no tokenizer.json: halfbyte takes gpt-oss's own vocabulary, other engines take none",
            "pull the model again, if others shall read it",
            again,
        )


@check("disk.space", "error", "room for the model that is not here yet, and for compiled kernels")
def space(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    size = weights(machine, purpose.model)
    here = purpose.model is not None and machine.ask("model", purpose.model) is not None
    if size is not None and not here and not str(purpose.model).startswith("random:"):
        disk = machine.ask("disk", models_root(machine)) or {}
        if disk and disk["free"] < size * 1.02:
            yield Finding(
                "error",
                f"{purpose.model} takes {gib(size)}; {gib(disk['free'])} are free under {models_root(machine)}",
                "free some space, or name another disk",
                ("export HALFBYTE_MODELS_DIR=/path/on/another/disk",),
            )
    disk = machine.ask("disk", cache_root(machine)) or {}
    if disk and disk["free"] < CACHE_ROOM:
        yield Finding(
            "warning",
            f"{gib(disk['free'])} are free under {cache_root(machine)}: compiled kernels may not be kept",
            "free some space",
            ("halfbyte cache list", "halfbyte cache clear all --stale"),
        )


@check("disk.speed", "warning", "how fast the model's disk reads, past the page cache (a quarter of a gigabyte)")
def speed(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    found = None if purpose.model is None else machine.ask("model", purpose.model)
    if found is None or not found.get("largest"):
        return
    folder = purpose.model if found["kind"] == "safetensors" else None
    measured = machine.ask("read_speed", f"{folder}/{found['largest']}" if folder else str(purpose.model))
    disk = machine.ask("disk", str(purpose.model)) or {}
    if measured and measured["seconds"] > 0:
        rate = measured["bytes"] / measured["seconds"]
        if rate < SLOW:
            kind = f", a {disk['kind']} file system" if disk.get("kind") in REMOTE else ""
            yield Finding(
                "warning",
                f"{purpose.model}{kind} reads {rate / 1e6:.0f} MB/s: loading takes {found['bytes'] / rate:.0f} s or "
                "more",
                "put the model on a local NVMe disk",
                (f"rsync -a {purpose.model} /path/on/nvme/",),
            )


@check("cache.folder", "warning", "the kernels' cache: whether it can be written, and outlives a container")
def folder(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    disk, root = machine.ask("disk", cache_root(machine)) or {}, cache_root(machine)
    if not disk:
        return
    if not disk["writable"]:
        yield Finding(
            "warning",
            f"{root} cannot be written: every start compiles again what the wheel did not bring",
            "name a folder that can",
            ("export HALFBYTE_CACHE_DIR=/path/that/can/be/written",),
        )
    elif machine.ask("container") is not None and disk["kind"] in FLEETING:
        yield Finding(
            "warning",
            f"{root} is on the container's own file system ({disk['kind']}): compiled kernels go with it",
            "mount a volume there",
            (f"docker run -v halfbyte-cache:{root.replace('~', '/root')} …",),
        )


@check("cache.stale", "warning", "compiled kernels whose sources, versions or architecture are no longer these")
def stale(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    by_module: dict[str, list[dict[str, Any]]] = {}
    for told in machine.ask("caches") or ():
        by_module.setdefault(told["module"], []).append(told)
    for module, found in by_module.items():
        size, count = sum(told["bytes"] for told in found), sum(told["count"] for told in found)
        worst = next((told for told in found if "suffix" in told["stale"]), found[0])
        ours = module in ("cpu", "cubin", "emulator", "prebuilt", "peers")  # they only take room
        yield Finding(
            "note" if ours else "warning",
            f"{count} stale {'entry' if count == 1 else 'entries'} ({size / 1e6:.0f} MB) in the cache of {module}, as "
            f"{worst['name']}: {worst['stale']}",
            "clear what is stale",
            (f"halfbyte cache clear {module} --stale",),
        )


@check("disk.swapfile", "note", "zram or zswap, which take their pages from the same unified memory")
def swapfile(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    if not unified(machine):
        return
    zram = [name for name in machine.folder("/sys/block") if name.startswith("zram")]
    sizes = [int((machine.file(f"/sys/block/{name}/disksize") or "0").strip() or 0) for name in zram]
    if any(sizes):
        yield Finding(
            "note",
            f"zram holds up to {gib(sum(sizes))} of compressed pages in the memory that the model needs",
            "switch it off",
            ("sudo systemctl disable --now zramswap",),
        )
