"""`explain`: which kernels each regime would take, and why each other one is refused, for any GPU, without that GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.architectures import ARCHES, GPUS
from halfbyte.cli.models import complete_model
from halfbyte.cli.options import MODEL, SHORT_SECONDS, Activity, JsonOption, announce, out, print_json, with_gates
from halfbyte.errors import UsageError
from halfbyte.gates import Gates

if TYPE_CHECKING:
    from halfbyte.explanation import Explanation, Proof, Room
    from halfbyte.kernels.prove import Evidence, Sibling

CONTEXT = 2048  # tokens that a request has when its speed is predicted


@with_gates
def explain(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help=f"{MODEL}. Without it: gpt-oss-120b as OpenAI publishes it, which need not be here.",
            autocompletion=complete_model,
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help=f"The machine to explain: {', '.join(ARCHES)}, or a GPU ({', '.join(GPUS)}). By default this one.",
            autocompletion=lambda: list(ARCHES),
        ),
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Also compile the kernels for it and read their machine code.")
    ] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Also list the layouts, and every kernel that was refused with its reason.")
    ] = False,
    engine: Annotated[str, typer.Option(help="halfbyte, or vllm: our kernels inside vLLM.")] = "halfbyte",
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Say whether a model fits a machine, this one or another, how fast it should be, and which kernels would run."""
    from halfbyte.explanation import explain as compute

    with Activity("choosing kernels", after=SHORT_SECONDS) as status:
        explanation = compute(model, arch, prove, engine, gates, status.update)
    if json:
        print_json(explanation.as_dict())
    else:
        show(explanation, why=why)
    if explanation.proof is not None:
        raise typer.Exit(0 if explanation.proof.ok else 1)


def show(e: Explanation, *, why: bool = False) -> None:
    from halfbyte.model.gpt_oss import SINKS_OFF
    from halfbyte.plan.step import REGIMES

    spec, selection, limits = e.spec, e.selection, e.arch.limits
    announce(e.gates, f"{e.model} on {e.arch.name}", cpu=not e.arch.is_gpu, stored=e.stored.coarsest())
    if e.gates.sinks == "off":
        out.print(f"[bold red]{SINKS_OFF}[/bold red]")
    for room in e.rooms:
        speed = expected_speed(room, e.gates) if room.contexts else ""
        out.print(f"[bold]{room.verdict}[/bold]{f'; {speed}' if speed else ''}")
    same = spec.at("long").activation == spec.at("prefill").activation  # then long prompts are as all prompts
    regimes = [r for r in REGIMES if r != "long" or not same]
    out.print(f"{chr(10) if e.rooms else ''}[bold]What runs[/bold]")
    for regime in REGIMES:
        kernels = ", ".join(selection.chosen[regime]) if regime in regimes else "as prefill"
        out.print(f"  {regime:<8} {limits.range(regime)}: {kernels}")
    formats = ", ".join(f"{role} {text}" for role, text in spec.matrices.texts().items())
    layouts = ", ".join(f"{role} {layout}" for role, layout in selection.layouts.items())
    out.print(f"\nweights  {formats}")
    out.print(f"values   activations {e.activation}, KV {spec.kv_dtype}, residual {spec.dtype}")
    if why:
        out.print(f"layouts  {layouts}")
    out.print(f"tested   {e.self_test}")
    for room in e.rooms:
        out.print(f"memory   {room.line}")
    for note in e.notes:
        out.print(f"NOTE     {note}", markup=False)
    if why:
        show_refusals(e, regimes)
    else:
        out.print("[dim]--why lists every other kernel and the reason why it is refused[/dim]")
    if e.proof is not None:
        show_proof(e.proof, e.arch.name)


def show_refusals(e: Explanation, regimes: Sequence[str]) -> None:
    selection = e.selection
    out.print(f"\n[bold]Why nothing else[/bold] (how many rows are which regime: {e.arch.limits.source})")
    for regime in regimes:
        out.print(f"  {regime}")
        reasons: dict[str, list[str]] = {}
        for refusal in selection.refusals:
            if refusal.regime == regime:
                reasons.setdefault(refusal.reason, []).append(refusal.phase)
        for reason, phases in reasons.items():
            names = ["reference.*"] if all(p.startswith("reference.") for p in phases) else phases
            out.print(f"    [dim]{', '.join(names)}: {reason}[/dim]")


def expected_speed(room: Room, gates: Gates) -> str:
    """One request's tokens per second: as `profile --predict` says, or at most what the memory's bandwidth allows."""
    from halfbyte.lab import predict, receipts
    from halfbyte.model.config import NAMED
    from halfbyte.model.gpt_oss import formats_after
    from halfbyte.roofline import HOST_READ, decode_ceiling, divided_ceiling

    shape = room.model.removeprefix("gpt-oss-")
    if room.gpu is None:
        return "`halfbyte bench` measures its speed"
    if shape not in NAMED:
        return ""
    if room.placement.host_layers:
        formats = formats_after(NAMED[shape], gates, arch=ARCHES[room.gpu.arch])
        most = divided_ceiling(room.gpu, NAMED[shape], formats, CONTEXT, room.placement.host_layers, HOST_READ)
        host = f"{HOST_READ / 1e9:.0f} GB/s"
        return f"both memories allow at most {most:.0f} tokens/s for one request, if the host reads {host}"
    name = next(key for key, gpu in GPUS.items() if gpu == room.gpu)
    try:
        p = predict.predict(name, shape, gates, CONTEXT, receipts.read_all())
    except UsageError:  # no measurement is here that a prediction could begin with
        p = None
    if p is None or p.void:
        formats = formats_after(NAMED[shape], gates, arch=ARCHES[room.gpu.arch])
        most = decode_ceiling(room.gpu, NAMED[shape], formats, CONTEXT).tokens_per_second
        return f"its memory allows at most {most:.0f} tokens/s for one request"
    low, high = p.scenarios[0].tokens_per_second, p.scenarios[-1].tokens_per_second
    kind = "measured" if p.measured else f"predicted, {low:.0f} to {high:.0f}"
    return f"about {p.central:.0f} tokens/s for one request ({kind})"


def show_proof(proof: Proof, arch: str) -> None:
    show_evidence(proof.evidence)
    if proof.siblings:
        out.print(sibling_sentence(proof.siblings, arch))
    show_groups("layer groups", proof.layer_groups)
    if proof.block_scaled is not None:
        gates = proof.block_scaled
        title = f"layer groups with --layers {gates.layers} --activation {gates.activation}"
        show_groups(title, proof.block_scaled_groups)


def show_groups(title: str, groups: Mapping[str, str]) -> None:
    out.print(f"\n[bold]{title}[/bold]")
    for group, kernels in groups.items():
        out.print(f"  {group:<8} {kernels}", markup=False)


def sibling_sentence(siblings: list[Sibling], arch: str) -> str:
    other = ARCHES[arch].sibling
    differing = [f"{s.kernel} ({s.difference})" for s in siblings if s.difference]
    if differing:
        return f"{arch} and {other} differ in {'; '.join(differing)}"
    return f"{arch} and {other}: {len(siblings)} kernels are equal, instruction for instruction"


def show_evidence(evidence: list[Evidence]) -> None:
    """Each kernel once, with the phases that share it."""
    from halfbyte.kernels.prove import spilled

    users: list[tuple[Evidence, list[str]]] = []
    for e in evidence:
        phases = next((names for k, names in users if replace(e, phase=k.phase) == k), None)
        if phases is None:
            users.append((e, phases := []))
        phases.append(e.phase)
    bad = [e.kernel for e, _ in users if not e.ok]
    verdict = (
        f"[red]{len(bad)} are not as promised: {', '.join(bad)}[/red]" if bad else "[green]all as promised[/green]"
    )
    out.print("\n[bold]proof[/bold] (compiled now, read from the machine code)")
    for e, phases in users:
        mma = ", ".join(f"{n} x{c}" for n, c in e.instructions.items()) or "no matrix instruction"
        promised = "[green]as promised[/green]" if e.ok else f"[red]{'; '.join(e.problems)}[/red]"
        out.print(f"  {e.kernel}: {e.target}, {mma} [dim]({', '.join(dict.fromkeys(phases))})[/dim]")
        promise = [f"must show {e.needed}"] if e.needed else []
        promise += [f"must not show {e.banned}"] if e.banned else []
        if promise:
            out.print(f"    {', '.join(promise)}".replace("\\b", "").replace("\\", ""), markup=False)
        out.print(
            f"    {e.registers} registers, {spilled(e)} spilled, "
            f"{e.shared_bytes} of {e.shared_limit} bytes shared memory: {promised}"
        )
    out.print(f"{len(users)} kernels: {verdict}")


def register(app: typer.Typer) -> None:
    app.command()(explain)
