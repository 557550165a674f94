"""`explain`: which kernels each regime would take, and why each other one is refused, for any GPU, without that GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from halfbyte.cli.options import JsonOption, ModelArgument, announce, err, out, print_json, with_gates
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.kernels import prove as proof
from halfbyte.kernels.prove import Evidence
from halfbyte.model import checkpoint, ready
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, SINKS_OFF, arch_of, choose
from halfbyte.plan.phase import ARCHES, Spec
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import BATCH_ROWS, DECODE_ROWS, LONG_ROWS, LONG_WHY, REGIMES

RANGES = {
    "decode": f"1–{DECODE_ROWS} rows",
    "batch": f"{DECODE_ROWS + 1}–{BATCH_ROWS} rows",
    "prefill": f"{BATCH_ROWS + 1}–{LONG_ROWS - 1} rows",
    "long": f"{LONG_ROWS} rows and more",
}


@with_gates
def explain(
    model: ModelArgument = None,
    arch: Annotated[str | None, typer.Option(help=f"{', '.join(ARCHES)}; default: this machine.")] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Compile it and read the machine code.")] = False,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Which kernels would run, per regime, and why every other one is refused."""
    if arch is not None and arch.lower() not in ARCHES:
        raise UsageError(f"there is no architecture {arch!r}; use {', '.join(ARCHES)}.")
    target = ARCHES[arch.lower()] if arch else arch_of(ready.pick_device(None))
    if model is None:
        name, config, found = "gpt-oss-120b", NAMED["120b"], dict(CHECKPOINT_FORMATS)
    else:
        resolved = ready.resolve(model)
        name, config = resolved.label, ready.config_of(resolved)
        found = dict(CHECKPOINT_FORMATS)
        if resolved.path is not None:
            source = checkpoint.open_model(resolved.path)
            found = ready.formats_of(source)
            source.close()
    spec, chosen, selection = choose(config, gates, target, found)
    evidence = gather(spec, chosen, target.name, gates) if prove else []
    values = ", ".join([spec.activation, *(f"{a} in {r}" for r, a in spec.activations.items())])
    if json:
        found_out = selection.as_dict() | {"model": name, "gates": gates.as_dict(), "activation": values}
        found_out |= {"rows": RANGES, "long": LONG_WHY}
        print_json(found_out | {"evidence": [asdict(e) for e in evidence]} if prove else found_out)
        return
    announce(gates, f"{name} on {target.name}")
    if gates.sinks == "off":
        out.print(f"[bold red]{SINKS_OFF}[/bold red]")
    formats = ", ".join(f"{role} {kind}" for role, kind in spec.formats.items())
    out.print(f"weights  {formats}")
    out.print(f"values   activations {values}, KV {spec.kv_dtype}, residual {spec.dtype}\n")
    for regime in REGIMES:
        if regime == "long":
            if spec.at("long").activation == spec.at("prefill").activation:
                out.print(f"[bold]long[/bold] ({RANGES[regime]}): as prefill")
                continue
            out.print(f"[bold]long[/bold] ({RANGES[regime]}: {LONG_WHY})")
        else:
            out.print(f"[bold]{regime}[/bold] ({RANGES[regime]})")
        for phase in selection.chosen[regime]:
            out.print(f"  runs     {phase}")
        reasons: dict[str, list[str]] = {}
        for refusal in selection.refusals:
            if refusal.regime == regime:
                reasons.setdefault(refusal.reason, []).append(refusal.phase)
        for reason, phases in reasons.items():
            out.print(f"  [dim]refused  {', '.join(phases)}: {reason}[/dim]")
    layouts = ", ".join(f"{role} {layout}" for role, layout in selection.layouts.items())
    out.print(f"\nlayouts  {layouts}")
    if prove:
        show(evidence)


def gather(spec: Spec, chosen: Chosen, arch: str, gates: Gates) -> list[Evidence]:
    """Evidence for every chosen phase that can be compiled here."""
    found: list[Evidence] = []
    provable = set(proof.compilable())
    runs = {(p.name, spec.at(regime).activation): spec.at(regime) for regime, phases in chosen.items() for p in phases}
    with err.status("compiling") as status:
        for (name, _), here in runs.items():
            if name in provable:
                status.update(f"compiling {name} for {arch}")
                found += proof.prove(name, arch, here, gates)
    return found


def show(evidence: list[Evidence]) -> None:
    out.print("\n[bold]proof[/bold] (compiled now, read from the machine code)")
    for e in evidence:
        mma = ", ".join(f"{n} x{c}" for n, c in e.instructions.items()) or "no matrix instruction"
        verdict = "[green]as promised[/green]" if e.ok else f"[red]{'; '.join(e.problems)}[/red]"
        out.print(f"  {e.phase} {e.kernel}: {e.target}, {mma}")
        promise = [f"must show {e.needed}"] if e.needed else []
        promise += [f"must not show {e.banned}"] if e.banned else []
        if promise:
            out.print(f"    {', '.join(promise)}".replace("\\b", "").replace("\\", ""), markup=False)
        out.print(
            f"    {e.registers} registers, {e.spilled_bytes} bytes spilled, "
            f"{e.shared_bytes} of {e.shared_limit} bytes shared memory: {verdict}"
        )


def register(app: typer.Typer) -> None:
    app.command()(explain)
