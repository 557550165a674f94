"""`inspect`: what a checkpoint holds, and what each preset would make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from halfbyte.cli.options import (
    SHORT_SECONDS,
    Activity,
    DeviceOption,
    JsonOption,
    LoadingBar,
    ModelArgument,
    out,
    print_json,
    print_table,
)
from halfbyte.gates import Gates

if TYPE_CHECKING:
    from halfbyte.inspection import Inspection, LoudVectors, PresetForecast, TensorGroup
    from halfbyte.model.scales import ScaleSummary

GB = 1e9


def inspect(model: ModelArgument = None, device: DeviceOption = None, json: JsonOption = False) -> None:
    """Show what a checkpoint holds: formats, ranges, scale codes, and what each preset would make of it."""
    from halfbyte.inspection import inspect_model
    from halfbyte.lab.machine import device_roof
    from halfbyte.model import load

    name, where = load.resolve_model(model), load.resolve_device(device)
    with Activity("measuring this machine's memory", after=SHORT_SECONDS):
        roof = device_roof(where, load.weight_bytes(name, Gates()))
    with LoadingBar(f"inspecting {name.label}") as progress:
        inspection = inspect_model(model, roof, progress)
    if json:
        print_json(inspection.as_dict())
    else:
        show(inspection)


def show(i: Inspection) -> None:
    c = i.config
    out.print(
        f"[bold]{i.model}[/bold]: {i.parameters / GB:.2f} G parameters in {i.bytes / GB:.2f} GB, {i.files} "
        f"{'file' if i.files == 1 else 'files'}; {c['layers']} layers, {c['experts']} experts ({c['top_k']} a token), "
        f"hidden {c['hidden']}, context {c['max_context']}"
    )
    show_tensors(i)
    show_scales(i)
    show_ranges(i)
    show_presets(i)
    for note in i.notes:
        out.print(f"NOTE {note}", markup=False)


def show_tensors(i: Inspection) -> None:
    by_format: dict[str, list[TensorGroup]] = {}
    for g in i.tensors:
        by_format.setdefault(", ".join(g.formats), []).append(g)
    for name, groups in by_format.items():
        shapes = ", ".join(f"{g.role} {'x'.join(map(str, g.shape))}" for g in groups if len(g.shape) > 1)
        out.print(f"  {name} ({sum(g.bytes for g in groups) / GB:.2f} GB): {shapes or 'vectors'}", markup=False)


def show_scales(i: Inspection) -> None:
    if not i.scales:
        out.print("\nno tensor is MXFP4")
        return
    facts: dict[str, Callable[[ScaleSummary], str]] = {
        "largest": lambda s: f"2^{s.largest - 127} (code {s.largest}, layer {s.largest_layer})",
        "smallest": lambda s: f"2^{s.smallest - 127} (code {s.smallest})",
        "widest row": lambda s: f"{s.row_spread} octaves",
        "99.9 % of groups": lambda s: f"{s.bulk} codes",
        "zero groups": zero_text,
        "18 octaves or more down": lambda s: f"{s.far} in {s.far_tensors} of {s.tensors} tensors",
        "loud rows, column groups": lambda s: f"{s.loud_rows}, {s.loud_columns}",
        "NaN (code 255)": lambda s: str(s.nan_codes),
    }
    rows = [{"MXFP4 scales": fact, **{s.role: text(s) for s in i.scales}} for fact, text in facts.items()]
    out.print()
    print_table(rows)


def zero_text(s: ScaleSummary) -> str:
    count = s.zero_codes if s.zero_groups is None else s.zero_groups
    under = "" if s.zero_groups is None else f", code 0: {s.zero_codes}"
    return f"{count} ({s.zero_share:.2%}{under})"


def show_ranges(i: Inspection) -> None:
    rows = [
        {
            "values": r.role, "low": f"{r.low:.3g}", "high": f"{r.high:.3g}", "smallest": f"{r.smallest:.2g}",
            "rms": f"{r.rms:.3g}", "layer": "" if r.high_layer is None else str(r.high_layer),
            "loud rows": loud_text(r.loud_rows), "columns": loud_text(r.loud_columns),
            "NaN": str(r.nonfinite),
            "denormal scales": "" if r.denormal_scales is None else f"{r.denormal_scales:.1%}",
        }
        for r in i.ranges
    ]  # fmt: skip
    if all(not row["denormal scales"] for row in rows):
        for row in rows:
            del row["denormal scales"]
    out.print()
    print_table(rows)
    out.print("[dim]layer: of the largest magnitude; loud: more than 8 times the median, and the loudest's ratio[/dim]")
    if i.zero_tensors:
        more = f" and {len(i.zero_tensors) - 8} more" if len(i.zero_tensors) > 8 else ""
        out.print(f"all zero: {', '.join(i.zero_tensors[:8])}{more}", markup=False)


def loud_text(v: LoudVectors | None) -> str:
    return "" if v is None else f"{v.count}, x{v.ratio:.1f}"


def show_presets(i: Inspection) -> None:
    rows = [
        {
            "preset": p.preset, "weights": f"{p.weight_bytes / GB:.2f}", "context": f"{p.context_bytes / GB:.2f}",
            "tok/s": f"{p.tokens_per_second:.0f}", **error_texts(p),
        }
        for p in i.presets
    ]  # fmt: skip
    out.print()
    print_table(rows)
    out.print(
        f"[dim]weights and one full context in GB; tok/s: at most, by memory bandwidth at 2,048 tokens ({i.machine}); "
        "qkv, o, lm_head: relative error of the weights behind their norm (worst layer)[/dim]"
    )


def error_texts(p: PresetForecast) -> dict[str, str]:
    return {group: "as stored" if e is None else f"{e.mean:.1%} ({e.worst:.1%})" for group, e in p.errors.items()}


def register(app: typer.Typer) -> None:
    app.command()(inspect)
