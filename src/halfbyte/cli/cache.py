"""`cache`: what was compiled and is kept, by whom; what of it is stale; clear it, or fill ours ahead. With
--prefix-folder: what a folder of prefixes holds; verify or clear it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli.options import SHORT_SECONDS, Activity, JsonOption, out, print_json, print_table
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.caches import CacheEntry, Module

ACTIONS = ("list", "clear", "warm", "verify")
ALL = "all"
WARMED_ELSEWHERE = {
    "flashinfer": "vLLM's first start compiles what it needs of FlashInfer",
    "triton": "the first start of a model on a GPU compiles Triton's kernels",
    "vllm": "vLLM's first start fills it",
    "inductor": "vLLM's first start fills it",
    "extensions": "whatever uses an extension builds it",
    "emulator": "the tests build what they need",
    "self-test": "the first start of a model on a GPU runs it",
    "peers": "`halfbyte compare` builds what it needs",
    "prebuilt": "`halfbyte prebuild` fills it, for any architecture",
}


def cache(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, clear or warm; verify with --prefix-folder.")
    ] = "list",
    modules: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODULE[/ENTRY]", help="Whose cache: cpu, cubin, flashinfer, triton, vllm …, or all."),
    ] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Only entries whose sources have changed since.")] = False,
    older_than: Annotated[float | None, typer.Option(help="Only entries older than this many days.", min=0)] = None,
    entries: Annotated[
        bool, typer.Option("--entries", help="With list: show every entry, not only every module.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With clear: say what would be removed, and remove nothing.")
    ] = False,
    prefix_folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="List, verify or clear what `serve --prefix-folder DIR` has stored there."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List, clear or warm the caches of compiled kernels: ours, FlashInfer's, Triton's, vLLM's; or a prefix folder."""
    if action not in ACTIONS:
        raise UsageError(f"there is no action {action!r}; use {', '.join(ACTIONS)}.")
    if prefix_folder is not None:
        if modules or stale or older_than is not None or entries or action == "warm":
            raise UsageError("--prefix-folder goes with list, verify, clear, --dry-run and --json alone.")
        _prefixes(action, prefix_folder.expanduser(), dry_run, json)
        return
    if action == "verify":
        raise UsageError("verify needs --prefix-folder DIR; compiled kernels are verified when they are loaded.")
    if action == "warm":
        _warm(modules or [], json)
    elif action == "clear":
        _clear(modules or [], stale, older_than, dry_run, json)
    else:
        _list(modules or [], stale, older_than, entries, json)


def _chosen(names: list[str]) -> list[tuple[Module, str]]:
    """Modules, each with the entry that was named of it or with nothing."""
    from halfbyte.caches import MODULES

    choices = []
    for name in names or [ALL]:
        module, _, entry = name.partition("/")
        if module != ALL and module not in MODULES:
            raise UsageError(f"there is no cache {module!r}; there are {', '.join(MODULES)}, and {ALL}.")
        choices += [(m, "") for m in MODULES.values()] if module == ALL else [(MODULES[module], entry)]
    return choices


def _selected(
    chosen: Iterable[tuple[Module, str]], stale: bool, older_than: float | None
) -> list[tuple[Module, list[CacheEntry]]]:
    from fnmatch import fnmatchcase

    selected = []
    with Activity("looking at the caches", after=SHORT_SECONDS):
        for module, name in chosen:
            entries = [e for e in module.entries(deep=True) if not name or fnmatchcase(e.name, name)]
            if name and not entries:
                raise UsageError(f"{module.name} has no entry {name!r}; `halfbyte cache list {module.name} --entries`.")
            entries = [e for e in entries if not stale or e.stale]
            selected.append((module, [e for e in entries if older_than is None or e.age_days() >= older_than]))
    return selected


def _list(names: list[str], stale: bool, older_than: float | None, single: bool, json: bool) -> None:
    import psutil

    from halfbyte.caches import max_jobs

    selected = _selected(_chosen(names), stale, older_than)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = max_jobs(psutil.virtual_memory().available, cores)
    if json:
        listed = [
            _summary(module, entries) | {"entries": [e.as_dict() for e in entries]} for module, entries in selected
        ]
        print_json({"modules": listed, "bytes": sum(m["bytes"] for m in listed), "max_jobs": jobs})
        return
    if single:
        for _, entries in selected:
            for e in entries:  # names are longer than a table is wide
                line = f"{e.module}/{e.name}  {_size(e.bytes)}, {e.age_days():.0f} days  {e.stale}"
                out.print(line.rstrip(), markup=False)
        return
    rows = []
    for module, entries in selected:
        m = _summary(module, entries)
        days = f"{m['newest_days']:.0f}–{m['oldest_days']:.0f}" if entries else "–"
        rows.append(
            {"cache": module.name, "of": module.owner, "entries": str(len(entries)), "size": _size(m["bytes"]),
             "days": days, "stale": f"{m['stale']} ({_size(m['stale_bytes'])})" if m["stale"] else "–"}
        )  # fmt: skip
    print_table(rows)
    out.print(f"MAX_JOBS={jobs} for kernels that FlashInfer or vLLM compile here: (available memory − 16 GiB) / 8 GiB")


def _summary(module: Module, entries: list[CacheEntry]) -> dict[str, Any]:
    ages = [e.age_days() for e in entries]
    gone = [e for e in entries if e.stale]
    return {
        "module": module.name, "owner": module.owner, "holds": module.holds, "folder": str(module.location()),
        "count": len(entries), "bytes": sum(e.bytes for e in entries), "newest_days": round(min(ages, default=0), 1),
        "oldest_days": round(max(ages, default=0), 1), "stale": len(gone), "stale_bytes": sum(e.bytes for e in gone),
    }  # fmt: skip


def _clear(names: list[str], stale: bool, older_than: float | None, dry_run: bool, json: bool) -> None:
    from halfbyte.caches import MODULES, check_folder, remove

    if not names:
        raise UsageError(f"say what to clear: {', '.join(MODULES)}, or {ALL}; MODULE/ENTRY clears one entry.")
    selected = _selected(_chosen(names), stale, older_than)
    for module, _ in selected:
        if module.location().is_dir():
            check_folder(module.location())  # before anything is gone
    removed = [e for _, entries in selected for e in entries]
    for e in removed:
        if not dry_run:
            remove(e)
    size = sum(e.bytes for e in removed)
    if json:
        print_json({"removed": [e.as_dict() for e in removed], "bytes": size, "dry_run": dry_run})
        return
    for e in removed:
        out.print(f"{e.module}/{e.name}  {_size(e.bytes)}  {e.stale}".rstrip(), markup=False)
    out.print(f"{len(removed)} entries, {_size(size)}: {'nothing was removed (--dry-run)' if dry_run else 'removed'}")


def _prefixes(action: str, folder: Path, dry_run: bool, json: bool) -> None:
    """What a folder of prefixes holds, whether it is intact, and how it is emptied."""
    import time
    from dataclasses import asdict

    from halfbyte.kv.prefix_store import LOCK, PrefixStore

    if not (folder / LOCK).is_file():
        raise UsageError(f"{folder} is not a folder of prefixes; give the one that --prefix-folder named.")
    store = PrefixStore(folder, None, 0)
    parts, size = store.contents(), store.stats().bytes
    result: dict[str, Any] = {"folder": str(folder), "bytes": size}
    damaged = 0
    if action == "list":
        result["parts"] = [asdict(part) for part in parts]
    elif action == "verify":
        with Activity("reading every page", after=SHORT_SECONDS):
            intact, damaged = store.verify()
        result |= {"intact": intact, "damaged": damaged}
    else:
        result |= {"removed": 0 if dry_run else store.clear(), "dry_run": dry_run}
    store.close()
    if json:
        print_json(result)
    elif action == "list":
        if parts:
            print_table([
                {"model and plan": part.identity[:12] or "unreadable", "files": str(part.segments),
                 "pages": str(part.pages), "size": _size(part.bytes),
                 "days": f"{max(0.0, time.time() - part.modified) / 86400:.0f}" if part.modified else "–"}
                for part in parts
            ])  # fmt: skip
        out.print(f"{folder}: {_size(size)} of prefixes; prompts can be reconstructed from them", markup=False)
    elif action == "verify":
        out.print(f"{folder}: {result['intact']} records intact, {damaged} damaged", markup=False)
    else:
        out.print(f"{folder}: {_size(size)} {'would be removed' if dry_run else 'removed'}", markup=False)
    if damaged:
        raise typer.Exit(1)


def _warm(names: list[str], json: bool) -> None:
    """What can be made without a model: the CPU kernels, and the CUDA kernels of this machine's GPU."""
    if not names:
        raise UsageError("say what to warm: cpu, cubin.")
    done: dict[str, str] = {}
    for module, _ in _chosen(names):
        if module.name in WARMED_ELSEWHERE:
            if ALL in names:
                continue
            raise UsageError(f"{module.name} cannot be warmed from here: {WARMED_ELSEWHERE[module.name]}.")
        done[module.name] = _warm_cpu() if module.name == "cpu" else _warm_cubins(required=ALL not in names)
    if json:
        print_json({"warmed": done})
    else:
        for name, outcome in done.items():
            out.print(f"{name}: {outcome}", markup=False)


def _warm_cpu() -> str:
    from halfbyte.kernels.cpu.build import Unavailable
    from halfbyte.kernels.cpu.library import open_library

    try:
        with Activity("compiling the CPU kernels"):
            return str(open_library("auto").path)
    except Unavailable as e:
        raise UsageError(f"the CPU kernels cannot be had here: {e}.") from None


def _warm_cubins(*, required: bool) -> str:
    import torch

    from halfbyte.caches import preset_plans
    from halfbyte.kernels.launch import compile_program
    from halfbyte.kernels.prebuilt import programs_of
    from halfbyte.model.gpt_oss import arch_of

    if not torch.cuda.is_available():
        if required:
            raise UsageError("there is no GPU here to warm for; `halfbyte prebuild --arch sm121` makes them for one.")
        return "no GPU here"
    arch = arch_of(torch.device("cuda"))
    programs = sorted(programs_of(preset_plans([arch], ("20b", "120b"))), key=str)
    with Activity("compiling") as status:
        for i, (program, target) in enumerate(programs):
            status.update(f"compiling, {i} of {len(programs)}: {program.source.name}")
            compile_program(program, target)
    return f"{len(programs)} programs for {arch.name}"


def _size(n: int) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}"
        n /= 1000  # type: ignore[assignment]
    return f"{n:.1f} GB"


def register(app: typer.Typer) -> None:
    app.command()(cache)
