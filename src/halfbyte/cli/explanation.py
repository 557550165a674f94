"""What `explain` finds and shows: which kernels each regime takes on a machine, and why each other one is refused.

Nothing here needs the machine it is about, except that a proof compiles for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import typer

from halfbyte.cli.options import announce, err, out, print_json
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.sizing import memory_account, page_limits
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.gates import LAYER_GROUPS, Gates
from halfbyte.kernels import prove as proof
from halfbyte.kernels.cpu.phase import remark as cpu_remark
from halfbyte.kernels.lent import LAYER_PHASES
from halfbyte.kernels.prove import Evidence, Sibling
from halfbyte.memory import MemoryState, gib
from halfbyte.model import checkpoint, load, pulled, self_test
from halfbyte.model.config import NAMED, ModelConfig
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, SINKS_OFF, arch_of, choose, page_bytes
from halfbyte.plan.phase import ARCHES, Arch, Spec
from halfbyte.plan.record import Selection
from halfbyte.plan.select import Chosen
from halfbyte.plan.step import REGIMES
from halfbyte.roofline import GPUS, Gpu, gpu_named
from halfbyte.vllm_plugin import layers as vllm_layers
from halfbyte.vllm_plugin import selection as vllm_selection
from halfbyte.vllm_plugin.launch import vllm_command
from halfbyte.vllm_plugin.selection import Shapes

INSIDE_UNTESTED = "no: inside vLLM the plugin counts what ran instead (--record)"
PUBLISHED = {"openai/gpt-oss-20b": "20b", "openai/gpt-oss-120b": "120b"}  # shapes that are known without the files


@dataclass(frozen=True)
class Explained:
    """A model, as far as choosing kernels for it goes."""

    name: str
    model: load.ModelName
    config: ModelConfig
    stored: Mapping[str, str]  # role -> format
    remarks: tuple[str, ...] = ()


def model_of(text: str | None) -> Explained:
    """Its files say in which formats the weights are; OpenAI's own models are known without them."""
    repo = "openai/gpt-oss-120b" if text is None else pulled.repository(text)
    try:
        resolved = load.resolve_model(f"{load.RANDOM}120b" if text is None else text)
    except CheckpointError:
        if repo not in PUBLISHED:
            raise
        resolved = load.resolve_model(f"{load.RANDOM}{PUBLISHED[repo]}")
        remarks = (f"the files of {repo} are not here; this is what follows from its published shape.",)
        name = repo.partition("/")[2]
        return Explained(name, resolved, load.config_of(resolved), CHECKPOINT_FORMATS, remarks)
    if text is None:
        return Explained("gpt-oss-120b", resolved, load.config_of(resolved), CHECKPOINT_FORMATS)
    stored: Mapping[str, str] = CHECKPOINT_FORMATS
    if resolved.path is not None:
        source = checkpoint.open_model(resolved.path)
        stored = load.formats_of(source)
        source.close()
    return Explained(resolved.label, resolved, load.config_of(resolved), stored)


def explain(model: str | None, arch: str | None, prove: bool, engine: str, json: bool, gates: Gates) -> None:
    if engine not in ("halfbyte", "vllm"):
        raise UsageError(f"--engine is {engine!r}; use halfbyte or vllm.")
    target, cards = machine_of(arch) if arch else (arch_of(load.resolve_device(None)), [])
    subject = model_of(model)
    name, config = subject.name, subject.config
    inside = engine == "vllm"
    spec, chosen, selection = (
        choose_inside_vllm(config, gates, target, name)
        if inside
        else choose(config, gates, target, dict(subject.stored))
    )
    here = torch.cuda.is_available() and arch_of("cuda") == target
    tested = INSIDE_UNTESTED if inside else self_test.describe((spec, chosen, selection), target, here)
    evidence = gather(spec, chosen, target.name, gates) if prove else []
    siblings = compare(spec, chosen, target.name, gates) if prove else []
    groups = by_group(chosen, evidence)
    native = block_scaled(gates, target) if inside and prove else None
    if native is not None:
        at, taken, _ = choose_inside_vllm(config, native, target, name)
        more = gather(at, taken, target.name, native)
        evidence, native_groups = evidence + more, by_group(taken, more)
    shapes = [(name, config, load.weight_bytes(subject.model, gates))]
    if model is None:
        shapes.append(("gpt-oss-20b", NAMED["20b"], load.weight_bytes(load.resolve_model("random:20b"), gates)))
    cards = cards or [gpu for gpu in GPUS.values() if gpu.arch == target.name]
    rooms = [room for gpu in cards for room in rooms_on(gpu, target, shapes, gates)]
    if inside:
        rooms = []  # vLLM has its own account
    limits = target.limits
    values = ", ".join([spec.activation, *(f"{a} in {r}" for r, a in spec.activations.items())])
    remarks = notes_inside_vllm(selection, target) if inside else notes(spec, selection, target, gates)
    remarks = [*subject.remarks, *remarks]
    if json:
        answer = selection.as_dict() | {"model": name, "gates": gates.as_dict(), "activation": values, "notes": remarks}
        answer |= {"rows": {r: limits.range(r) for r in REGIMES}, "limits": limits.source, "self_test": tested}
        answer |= {"memory": rooms}
        if prove:
            answer |= {"evidence": [asdict(e) for e in evidence], "siblings": [asdict(s) for s in siblings]}
            answer |= {"layer_groups": groups} | ({} if native is None else {"block_scaled": native_groups})
        print_json(answer)
        raise typer.Exit(int(any(not e.ok for e in evidence)))
    announce(gates, f"{name} on {target.name}")
    if gates.sinks == "off":
        out.print(f"[bold red]{SINKS_OFF}[/bold red]")
    same = spec.at("long").activation == spec.at("prefill").activation  # then long prompts are as all prompts
    regimes = [r for r in REGIMES if r != "long" or not same]
    out.print("[bold]What runs[/bold]")
    for regime in REGIMES:
        kernels = ", ".join(selection.chosen[regime]) if regime in regimes else "as prefill"
        out.print(f"  {regime:<8} {limits.range(regime)}: {kernels}")
    formats = ", ".join(f"{role} {kind}" for role, kind in spec.formats.items())
    layouts = ", ".join(f"{role} {layout}" for role, layout in selection.layouts.items())
    out.print(f"\nweights  {formats}")
    out.print(f"values   activations {values}, KV {spec.kv_dtype}, residual {spec.dtype}")
    out.print(f"layouts  {layouts}")
    out.print(f"tested   {tested}")
    for room in rooms:
        out.print(f"memory   {room}")
    for note in remarks:
        out.print(f"NOTE     {note}", markup=False)
    out.print(f"\n[bold]Why nothing else[/bold] (how many rows are which regime: {limits.source})")
    for regime in regimes:
        out.print(f"  {regime}")
        reasons: dict[str, list[str]] = {}
        for refusal in selection.refusals:
            if refusal.regime == regime:
                reasons.setdefault(refusal.reason, []).append(refusal.phase)
        for reason, phases in reasons.items():
            names = ["reference.*"] if all(p.startswith("reference.") for p in phases) else phases
            out.print(f"    [dim]{', '.join(names)}: {reason}[/dim]")
    if prove:
        show(evidence)
        if siblings:
            out.print(f"{said_of_siblings(siblings, target.name)}")
        show_groups("layer groups", groups)
        if native is not None:
            show_groups(f"layer groups with --layers {native.layers} --activation {native.activation}", native_groups)
        raise typer.Exit(int(any(not e.ok for e in evidence)))


def choose_inside_vllm(config: ModelConfig, gates: Gates, target: Arch, name: str) -> tuple[Spec, Chosen, Selection]:
    """As the plugin chooses in each of vLLM's processes; what vLLM's command line cannot say is refused first."""
    vllm_command(name, gates).check()
    c = config
    shapes = Shapes(
        c.layers, c.hidden, c.intermediate, c.experts, c.top_k, c.heads, c.kv_heads, c.head_dim, c.vocab, c.window
    )
    choice = vllm_layers.choose(shapes, gates, target)
    return choice.spec, choice.chosen, replace(choice.selection, notes=(choice.why,) if choice.why else ())


def notes_inside_vllm(selection: Selection, target: Arch) -> list[str]:
    """The kernel of each layer group in one line; operations that vLLM keeps are named vllm.*."""
    groups = {}
    for group in LAYER_GROUPS:
        names = [n for names in selection.chosen.values() for n in names if covers(n, group)]
        groups[group] = "/".join(dict.fromkeys(names))
    remarks = ["layer groups inside vLLM: " + ", ".join(f"{g} {k}" for g, k in groups.items()) + "."]
    remarks += [f"single operations are ours, not whole layers: {why}." for why in selection.notes]
    if any(kernel.startswith("vllm.") for kernel in groups.values()):
        remarks.append("vllm.* runs as vLLM has it; --mxfp4-layers all gives every dense layer to us, in MXFP4.")
    if target.is_gpu and target.name != "sm90":
        remarks.append(f"compiled and read for {target.name}, and run on no such machine yet.")
    return remarks


def block_scaled(gates: Gates, target: Arch) -> Gates | None:
    """Gates under which every layer group multiplies block-scaled, where a machine has that and nothing was said about
    activations: the default keeps them in bf16, whose products are not."""
    if target.name not in proof.SIBLINGS or gates.activation != "auto":
        return None
    plain = gates.layers == Gates().layers
    return replace(gates, layers=Gates(layers="all").layers if plain else gates.layers, activation="mxfp8")  # type: ignore[arg-type]


def by_group(chosen: Chosen, evidence: Sequence[Evidence]) -> dict[str, str]:
    """The kernels of each layer group, with the matrix instructions that were found in them."""
    groups = {}
    for group in LAYER_GROUPS:
        names = dict.fromkeys(p.name for phases in chosen.values() for p in phases if group in p.covers)
        found = dict.fromkeys(i for e in evidence if e.phase in names for i in e.instructions)
        groups[group] = f"{'/'.join(names)}: {', '.join(found) or 'no matrix instruction'}"
    return groups


def show_groups(title: str, groups: Mapping[str, str]) -> None:
    out.print(f"\n[bold]{title}[/bold]")
    for group, kernels in groups.items():
        out.print(f"  {group:<8} {kernels}", markup=False)


def covers(phase: str, group: str) -> bool:
    return any(p.name == phase and group in p.covers for p in (*vllm_selection.PHASES, *LAYER_PHASES))


def notes(spec: Spec, selection: Selection, target: Arch, gates: Gates) -> list[str]:
    """What whoever has such a machine should know and the lists do not say."""
    if target.capability is None:
        said = cpu_remark(gates)
        return [f"{said}."] if said else []
    remarks = []
    decode, prompts = spec.at("decode").activation, spec.at("prefill").activation
    kernels = {name for names in selection.chosen.values() for name in names}
    lost = {r.phase: r.reason for r in selection.refusals if r.regime == "decode"}.get("cuda.decode_step", "")
    if all(name.startswith("triton.") for name in kernels):
        remarks.append(
            f"every kernel here is Triton's: cuda.decode_step, which takes one launch for all layers, {lost}."
        )
    elif lost and decode != "bf16":
        remarks.append(
            f"decode takes many launches a layer: cuda.decode_step, which takes one for all of them, {lost}. "
            f"--activation prefill={decode} keeps it, and {decode} for prompts."
        )
    if target.capability[0] >= 10 and prompts == "bf16" and spec.formats["gate_up"] == "mxfp4":
        remarks.append(
            "prompts run on the bf16 tensor cores. --activation prefill=mxfp8 or prefill=mxfp4 takes the block-scaled "
            "FP4 ones, and rounds activations (docs/numerics.md)."
        )
    if target.name != "sm90":
        ran = "" if target.name == "sm100" else ", but for their bf16 products on an H200 (bench/kernels/sm12x.py)"
        remarks.append(
            f"these kernels are compiled and read for {target.name}, and have run on no such machine yet{ran}."
        )
    return remarks


def machine_of(text: str) -> tuple[Arch, list[Gpu]]:
    """By an architecture's name, or by a GPU's: then that one alone."""
    if text.lower() in ARCHES:
        return ARCHES[text.lower()], []
    try:
        gpu = gpu_named(text)
    except UsageError:
        known = ", ".join([*ARCHES, *GPUS])
        raise UsageError(f"there is no architecture and no GPU {text!r}; use one of {known}.") from None
    return ARCHES[gpu.arch], [gpu]


def rooms_on(gpu: Gpu, arch: Arch, shapes: Sequence[tuple[str, ModelConfig, int]], gates: Gates) -> list[str]:
    """What is left for the KV cache on a GPU of the table, by the account that a start is held to."""
    size, said = int(gpu.memory), []
    shared = gpu.name.startswith("GB10")
    state = MemoryState(
        total=size, available=size, unified=shared, device_total=None if shared else size,
        device_free=None if shared else size,
    )  # fmt: skip
    for name, config, weights in shapes:
        options = EngineOptions(gates=gates)
        account = memory_account(config, options, state, weights=weights, own_process=True)  # as `serve` asks
        page = page_bytes(config, choose(config, gates, arch)[0])
        limits = page_limits(config, options, state, page)
        head = f"{gpu.name} ({gpu.memory / 1e9:.0f} GB), {name}: weights {gib(weights)}"
        if account.kv_room < limits.least * page:
            short = limits.least * page - account.kv_room
            said.append(f"{head}: does not fit, one context of {config.max_context} tokens is {gib(short)} short")
            continue
        contexts = (account.kv_room // page - 1) / (limits.least - 1)
        said.append(
            f"{head}, workspace {gib(account.workspace)}, reserve {gib(account.reserve)}: {gib(account.kv_room)} are "
            f"left for KV, {contexts:.1f} contexts of {config.max_context} tokens"
        )
    return said


def compare(spec: Spec, chosen: Chosen, arch: str, gates: Gates) -> list[Sibling]:
    """The machine code of every chosen phase beside that of the other SM12x."""
    found: dict[str, Sibling] = {}
    runs = {(p.name, spec.at(regime).activation): spec.at(regime) for regime, phases in chosen.items() for p in phases}
    with err.status("comparing") as status:
        for (name, _), at_regime in runs.items():
            if arch in proof.SIBLINGS and name in proof.compilable():
                status.update(f"comparing {name} for {arch} and {proof.SIBLINGS[arch]}")
                found |= {s.kernel: s for s in proof.compare_siblings(name, arch, at_regime, gates)}
    return list(found.values())


def said_of_siblings(siblings: list[Sibling], arch: str) -> str:
    other = proof.SIBLINGS[arch]
    differing = [f"{s.kernel} ({s.difference})" for s in siblings if s.difference]
    if differing:
        return f"{arch} and {other} differ in {'; '.join(differing)}"
    return f"{arch} and {other}: {len(siblings)} kernels are equal, instruction for instruction"


def gather(spec: Spec, chosen: Chosen, arch: str, gates: Gates) -> list[Evidence]:
    """Evidence for every chosen phase that can be compiled here."""
    evidence: list[Evidence] = []
    provable = set(proof.compilable(lent=True))
    runs = {(p.name, spec.at(regime).activation): spec.at(regime) for regime, phases in chosen.items() for p in phases}
    with err.status("compiling") as status:
        for (name, _), at_regime in runs.items():
            if name in provable:
                status.update(f"compiling {name} for {arch}")
                evidence += proof.prove(name, arch, at_regime, gates)
    return evidence


def show(evidence: list[Evidence]) -> None:
    """Kernels that several phases share once."""
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
            f"    {e.registers} registers, {proof.spilled(e)} spilled, "
            f"{e.shared_bytes} of {e.shared_limit} bytes shared memory: {promised}"
        )
    out.print(f"{len(users)} kernels: {verdict}")
