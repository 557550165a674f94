"""What `profile` measures, reads or predicts, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from halfbyte.cli.options import LoadingBar, announce, err, out, print_json, print_table
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.lab import environment, predict, receipts, timeline
from halfbyte.lab.kernel_table import KernelTable, from_profile, read_trace
from halfbyte.lab.machine import SMALL, device_roof
from halfbyte.lab.profile import Profile, decide
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss


def profile_trace(trace: Path, json: bool) -> None:
    found = read_trace(trace)
    if json:
        print_json(found.as_dict())
    else:
        show_table(found)


def profile_model(
    model: str | None, tokens: int, depth: int, batch: int, pp: int, device: str | None, json: bool, gates: Gates
) -> None:
    name = load.resolve_model(model)
    where = load.resolve_device(device)
    with LoadingBar(f"loading {name.label}") as progress:
        loaded = load.load_model(name, gates, device=where, progress=progress)
    longest = max(depth + tokens, pp) + 64
    if longest > loaded.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {loaded.config.max_context}.")
    announce(gates, f"{name.label} on {where}", cpu=where.type == "cpu")
    with err.status("profiling"):
        profiles = run(loaded, tokens, depth, batch, pp)
    verdicts = decide(profiles[0], differences=[str(d) for d in loaded.plan.differences()])
    if json:
        print_json(
            {
                "model": name.label,
                "profiles": [p.as_dict() for p in profiles],
                "decisions": [v.__dict__ for v in verdicts],
                "record": loaded.plan.record.as_dict(),
                "environment": environment.collect(gates),
            }
        )
        return
    for p in profiles:
        show(p, loaded)
        show_table(from_profile(p.as_dict()))
    out.print("\n[bold]what follows[/bold] (decode)")
    for v in verdicts:
        out.print(f"  {'→' if v.applies else ' '} {v.sentence}", markup=False)


def run(model: GptOss, tokens: int, depth: int, batch: int, pp: int) -> list[Profile]:
    import torch

    if model.device.type == "cpu" and model.weights.nbytes < SMALL:
        torch.set_num_threads(1)  # as `bench` does
    with torch.inference_mode():
        profiles = [timeline.decode_profile(model, tokens, depth, batch)]
        if pp:
            profiles.append(timeline.prefill_profile(model, pp))
    return profiles


def show(p: Profile, model: GptOss) -> None:
    gpu = device_roof(model.device, model.weights.nbytes)
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
    """The same seven categories whatever the source."""
    out.print(f"\n[bold]by category[/bold]: {table.what}, times of {table.per} ({table.source})")
    print_table(
        [
            {"category": r.category, "us": f"{r.us:.1f}", "share": f"{r.share:.1%}", "calls": f"{r.calls:.0f}",
             "most of it": ", ".join(r.kernels[:2])}
            for r in table.rows
        ]
    )  # fmt: skip
    whole = table.busy_us + table.idle_us
    idle = f"{table.idle_us:.1f} us ({table.idle_us / whole:.1%}) in {table.gaps:.0f} gaps" if whole else "nothing"
    out.print(f"idle       {idle}, longest {table.longest_gap_us:.1f} us", markup=False)
    for t in table.threads[:8]:
        text = f"{t.name}: busy {t.busy_us:.1f} us, waiting {t.waiting_us:.1f}, at work while the device idled"
        out.print(f"host       {text} {t.while_idle_us:.1f}", markup=False)
    if table.note:
        out.print(f"note       {table.note}", markup=False)


# ---- predictions ----------------------------------------------------------------------------------------------------


def show_predictions(names: str, shape: str, gates: Gates, depth: int, json: bool) -> None:
    known = receipts.read_all()
    predictions = [predict.predict(n.strip(), shape, gates, depth, known) for n in names.split(",") if n.strip()]
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
    print_table(rows, title=f"decode of {shape} at {depth}, {gates.layers}: a prediction, not a measurement")
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
        f"fixed {b.fixed_us:.2f} us a layer, of which the router {b.router_us:.2f}",
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
