"""How `profile` shows what was measured, read from a trace, or predicted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from halfbyte.cli.options import SHORT_SECONDS, Activity, LoadingBar, announce, out, print_json, print_table
from halfbyte.engine.placement import placed_gates
from halfbyte.errors import UsageError
from halfbyte.gates import Gates, preset_name
from halfbyte.lab import predict, receipts
from halfbyte.lab.kernel_table import KernelTable, from_profile, read_table
from halfbyte.lab.model_profile import profile_model
from halfbyte.lab.profile import Profile
from halfbyte.model import load
from halfbyte.roofline import Gpu


def show_trace(trace: Path, json: bool) -> None:
    table = read_table(trace)
    if json:
        print_json(table.as_dict())
    else:
        show_table(table)


def show_model(
    model: str | None,
    tokens: int,
    depth: int,
    batch: int,
    pp: int,
    device: str | None,
    receipt: Path | None,
    json: bool,
    gates: Gates,
) -> None:
    name = load.resolve_model(model)
    where = load.resolve_device(device)
    with load.OpenCheckpoint(name) as opened, LoadingBar(f"loading {name.label}") as progress:
        gates = placed_gates(opened.facts, gates, where)
        loaded = load.load_model(opened, gates, device=where, progress=progress)
    announce(gates, f"{name.label} on {where}", cpu=where.type == "cpu")
    with Activity("profiling", after=SHORT_SECONDS):
        profile = profile_model(name, loaded, tokens, depth, batch, pp)
    if receipt is not None:
        profile.file().write(receipt)
    if json:
        print_json(profile.as_dict())
        return
    for p in profile.profiles:
        show(p, profile.roof)
        table = from_profile(p.as_dict())
        if {r.category for r in table.rows} != {"other"}:  # the CPU kernels run a step in one call: no categories
            show_table(table)
    out.print("\n[bold]what follows[/bold] (decode)")
    for decision in profile.decisions:
        out.print(f"  {'→' if decision.applies else ' '} {decision.sentence}", markup=False)


def show(p: Profile, gpu: Gpu) -> None:
    rows: list[Mapping[str, str]] = []
    for line in p.lines:
        compute = line.bound == "compute"
        rate = "" if not line.bound else f"{line.tflop_per_s:.2f} TFLOP/s" if compute else f"{line.gb_per_s:.1f} GB/s"
        rows.append(
            {
                "row": line.label,
                "us": f"{line.us:.1f}",
                "of step": f"{line.of_step:.1%}",
                "launches": f"{line.launches:.0f}" if line.launches >= 1 else "",
                "achieved": rate,
                "of ceiling": "" if line.of_ceiling is None else f"{line.of_ceiling:.0%}",
            }
        )
    per = p.rows * 1e6 / p.step_us
    out.print(f"\n[bold]{p.what}[/bold]: {p.step_us:.1f} us, {per:.1f} tokens/s ({gpu.name}: {gpu.note})")
    print_table(rows)
    out.print(f"times      {p.how}", markup=False)
    for regime, names in p.phases.items():
        out.print(f"kernels    {regime}: {', '.join(names)}", markup=False)
    if p.host_us:
        text = ", ".join(f"{v:.1f} us {k}" for k, v in p.host_us_per_token.items())
        out.print(f"host       {text} per token, to queue a step", markup=False)
    out.print(
        f"device     {p.launches:.0f} launches a step, idle {p.idle_us:.1f} us in {p.gaps:.0f} gaps, "
        f"longest {p.longest_gap_us:.1f} us",
        markup=False,
    )
    for note in p.notes:
        out.print(f"note       {note}", markup=False)


def show_table(table: KernelTable) -> None:
    """Shows the seven categories, which every source has."""
    out.print(f"\n[bold]by category[/bold]: {table.what}, times of {table.per} ({table.source})")
    print_table(
        [
            {"category": r.category, "us": f"{r.us:.1f}", "share": f"{r.share:.1%}", "calls": f"{r.calls:.0f}",
             "most of it": ", ".join(r.kernels[:2])}
            for r in table.rows
        ]
    )  # fmt: skip
    total_us = table.busy_us + table.idle_us
    idle = (
        f"{table.idle_us:.1f} us ({table.idle_us / total_us:.1%}) in {table.gaps:.0f} gaps" if total_us else "nothing"
    )
    out.print(f"idle       {idle}, longest {table.longest_gap_us:.1f} us", markup=False)
    for t in table.threads[:8]:
        text = f"{t.name}: busy {t.busy_us:.1f} us, waiting {t.waiting_us:.1f}, at work while the device idled"
        out.print(f"host       {text} {t.while_idle_us:.1f}", markup=False)
    if table.note:
        out.print(f"note       {table.note}", markup=False)


# ---- predictions ----------------------------------------------------------------------------------------------------


def show_predictions(names: str, shape: str, gates: Gates, depth: int, json: bool) -> None:
    stored = receipts.read_all()
    predictions = [predict.predict(n.strip(), shape, gates, depth, stored) for n in names.split(",") if n.strip()]
    if not predictions:
        raise UsageError("--predict takes names of GPUs with commas between, for example gb10,rtx5090.")
    if json:
        print_json({"predictions": [p.as_dict() for p in predictions]})
        return
    rows: list[Mapping[str, str]] = []
    for p in predictions:
        low, central, high = (s.tokens_per_second for s in p.scenarios)
        rows.append(
            {
                "PREDICTED": p.gpu.name,
                "tokens/s": "–" if p.void else f"{central:.1f}",
                "range": "–" if p.void else "measured" if p.measured else f"{low:.1f} – {high:.1f}",
                "ceiling": f"{p.ceiling:.1f}",
                "share": "–" if p.void else f"{central / p.ceiling:.0%}",
            }
        )
    label = preset_name(gates, gpu=True) or str(gates.layers)
    print_table(rows, title=f"decode of {shape} at {depth}, {label}: a prediction, not a measurement")
    for p in predictions:
        explain_prediction(p)


def explain_prediction(p: predict.Prediction) -> None:
    b, g, r = p.basis, p.gpu, p.rehearsal
    out.print(f"\n[bold]{g.name}[/bold]")
    facts = [
        f"GPU      read {g.read / 1e9:.0f} GB/s ({g.note}), "
        f"{g.multiprocessors} multiprocessors at {g.ghz:.2f} GHz as published"
    ]
    if p.void:
        facts += [f"NONE     {p.void}"]
        for line in facts:
            out.print(f"  {line}", markup=False)
        return
    facts += [
        f"from     {b.receipt} ({b.state}): {b.model} {b.formats} @ {b.context} took {b.us:.1f} us on {b.gpu}; "
        f"trace in {b.trace_receipt}: streaming share {b.streaming:.3f} (lm_head), {b.streaming_short:.3f} (experts); "
        f"fixed {b.fixed_us:.2f} us a layer, of which the router {b.router_us:.2f}"
    ]
    if r:
        times = ", ".join(f"{us:.0f} us at {pace / 1e9:.0f} GB/s ({fixed:.2f})" for pace, us, fixed in r.times)
        part = "" if r.blocks == r.of else f" (of {r.of}, with their part of the memory)"
        facts.append(
            f"and      {r.receipt} ({r.state}): rehearsed on {r.device} with {r.blocks} blocks{part} and rings of "
            f"{r.slots} slots, us of a step (and of a layer beyond its bytes): {times}"
        )
    if not p.measured:
        gigabytes = f"{p.bytes / 1e9:.3f} GB"
        facts.append(f"time     = {gigabytes} / (read x streaming share) + layers x fixed cost; so, in tokens/s:")
    for s in () if p.measured else p.scenarios:
        facts.append(
            f"{s.name:8} {s.tokens_per_second:.1f}: read {s.read / 1e9:.0f} GB/s, streaming {s.streaming:.3f}, "
            f"fixed {s.fixed_us:.2f} us a layer"
        )
    if p.formula:
        by = " / ".join(f"{s.tokens_per_second:.1f}" for s in p.formula)
        facts.append(f"formula  without the rehearsal: {by} (low / central / high)")
    if p.checks:
        others = ", ".join(
            f"{c.what} {c.predicted_us:.0f} us, measured {c.measured_us:.0f} ({c.error:+.1%})" for c in p.checks
        )
        facts.append(f"checked  the share and fixed cost of the receipt give on the {b.gpu}: {others}")
    assumed = (
        "low: fixed cost as measured, streams like the experts'; central: waits scale with the clock; high: slower "
        "memory hides that much of them, but not the router's"
    )
    if r:
        least, best = (f"{v / 1e9:.0f}" for v in g.product_reads)
        assumed = (
            f"bandwidth: others' products are reported to read {least} to {best} GB/s there; central is their middle, "
            "high what a reading kernel gets, low as far below as that is above"
            if g.product_reads[0]
            else "bandwidth: low is the share of paper that a GB10 reaches, high an H200's, central half way"
        ) + "; clock and latencies are those of the GPU that rehearsed"
    facts += [f"assumed  {assumed}"] if not p.measured else []
    facts += [f"NOTE     {w}" for w in p.warnings]
    for line in facts:
        out.print(f"  {line}", markup=False)
