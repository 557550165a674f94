"""Explains a plan: which kernels each regime uses on a machine, and why each other kernel is refused.

The machine need not be present; a proof compiles for it. This module prints nothing; `cli/explain.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from halfbyte.engine.options import EngineOptions
from halfbyte.engine.placement import Placement, find_placement
from halfbyte.engine.sizing import memory_account, page_limits, with_fitting_steps
from halfbyte.errors import CheckpointError, NotEnoughMemoryError, UsageError
from halfbyte.formats.matrices import Formats
from halfbyte.gates import LAYER_GROUPS, Gates, Layers, as_stored, preset_name
from halfbyte.kernels import prove as proof
from halfbyte.kernels.cpu.phase import remark as cpu_remark
from halfbyte.kernels.lent import LAYER_PHASES
from halfbyte.kernels.prove import Evidence, Sibling
from halfbyte.memory import MemoryState, gib, read_memory
from halfbyte.model import load, pulled, self_test
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, arch_of, choose, page_bytes
from halfbyte.model.load import CheckpointFacts
from halfbyte.plan.phase import ARCHES, Arch, Spec
from halfbyte.plan.record import Selection
from halfbyte.plan.select import Chosen, PlanChoice
from halfbyte.plan.step import REGIMES
from halfbyte.roofline import GPUS, Gpu, gpu_named
from halfbyte.vllm_plugin import layers as vllm_layers
from halfbyte.vllm_plugin import selection as vllm_selection
from halfbyte.vllm_plugin.launch import vllm_command
from halfbyte.vllm_plugin.selection import Shapes

Progress = Callable[[str], None]
ANY_HOST = 1 << 50  # bytes of a host that is not known
INSIDE_UNTESTED = "no: inside vLLM the plugin counts what ran instead (--record)"
DETERMINISTIC = {
    "cpu": "--deterministic costs nothing here: the CPU's kernels add in one order, whatever else a step holds.",
    "gpu": "--deterministic: generated tokens take the kernels of batch, prompts those of prefill, however many rows "
    "there are, in steps of their own. No GPU has run this mode yet (docs/deterministic.md).",
}
PUBLISHED = {"openai/gpt-oss-20b": "20b", "openai/gpt-oss-120b": "120b"}  # shapes that are known without the files


@dataclass(frozen=True)
class Explained:
    """The facts about a model that the choice of kernels needs."""

    name: str
    model: load.ModelName
    config: ModelConfig
    stored: Mapping[str, str]  # role -> format
    remarks: tuple[str, ...] = ()


def model_of(text: str | None) -> Explained:
    """The facts about a model, from its files; for OpenAI's own models, without the files."""
    repo = "openai/gpt-oss-120b" if text is None else pulled.repository(text)
    try:
        resolved = load.resolve_model(f"{load.RANDOM}120b" if text is None else text)
    except CheckpointError:
        if repo not in PUBLISHED:
            raise
        resolved = load.resolve_model(f"{load.RANDOM}{PUBLISHED[repo]}")
        remarks = (f"the files of {repo} are not on this machine; this explanation uses its published shape.",)
        name = repo.partition("/")[2]
        return Explained(name, resolved, load.config_of(resolved), CHECKPOINT_FORMATS, remarks)
    if text is None:
        return Explained("gpt-oss-120b", resolved, load.config_of(resolved), CHECKPOINT_FORMATS)
    facts = load.read_facts(resolved)
    return Explained(resolved.label, resolved, facts.config, facts.formats)


@dataclass(frozen=True)
class Proof:
    """The results of compiling the chosen kernels."""

    evidence: list[Evidence]
    siblings: list[Sibling]  # each kernel for the other SM12x architecture
    layer_groups: dict[str, str]
    block_scaled: Gates | None = None  # gates under which every layer group multiplies block-scaled, where not these
    block_scaled_groups: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(e.ok for e in self.evidence)

    def as_dict(self) -> dict[str, Any]:
        groups = {"layer_groups": self.layer_groups}
        if self.block_scaled is not None:
            groups["block_scaled"] = self.block_scaled_groups
        parts = {"evidence": [asdict(e) for e in self.evidence], "siblings": [asdict(s) for s in self.siblings]}
        return parts | groups


@dataclass(frozen=True)
class Room:
    """A model in the memory of a machine. `contexts`: how many full ones the KV cache holds; 0: it does not fit."""

    machine: str
    gpu: Gpu | None  # of the table of GPUs; None: this machine
    model: str
    contexts: float
    context: int  # tokens
    line: str
    placement: Placement

    @property
    def verdict(self) -> str:
        if not self.contexts:
            return f"{self.model} does not fit {self.machine}"
        room = f"with room for {self.contexts:.1f} contexts of {self.context} tokens"
        if not self.placement.host_layers:
            return f"{self.model} fits {self.machine}, {room}"
        return f"{self.model} fits {self.machine} with {self.placement.line}, {room}"


@dataclass(frozen=True)
class Explanation:
    model: str
    arch: Arch
    gates: Gates
    spec: Spec
    selection: Selection
    activation: str
    self_test: str
    notes: list[str]
    rooms: list[Room]  # for each GPU and model
    stored: Formats  # in the file
    proof: Proof | None = None

    def as_dict(self) -> dict[str, Any]:
        limits = self.arch.limits
        preset = preset_name(self.gates, gpu=self.arch.is_gpu, stored=self.stored.coarsest())
        facts = {
            "model": self.model,
            "preset": preset,
            "gates": self.gates.as_dict(),
            "activation": self.activation,
            "notes": self.notes,
        }
        rows = {"rows": {r: limits.range(r) for r in REGIMES}, "limits": limits.source, "self_test": self.self_test}
        sections = self.selection.as_dict() | facts | rows | {"memory": [room.line for room in self.rooms]}
        return sections if self.proof is None else sections | self.proof.as_dict()


def explain(
    model: str | None, arch: str | None, prove: bool, engine: str, gates: Gates, progress: Progress = lambda _: None
) -> Explanation:
    if engine not in ("halfbyte", "vllm"):
        raise UsageError(f"--engine is {engine!r}; use halfbyte or vllm.")
    target, cards = machine_of(arch) if arch else (arch_of(load.resolve_device(None)), [])
    subject, inside = model_of(model), engine == "vllm"
    gates = as_stored(gates) if inside else gates
    rooms = [] if inside else _rooms(subject, model is None, target, cards, gates, arch is None)  # vLLM has its account
    if len({room.machine for room in rooms}) == 1:  # a plan for this one, with its placement of experts
        gates = rooms[0].placement.gates
    choice = _choose(subject, gates, target, inside)
    spec, selection = choice.spec, choice.selection
    here = torch.cuda.is_available() and arch_of("cuda") == target
    return Explanation(
        subject.name,
        target,
        gates,
        spec,
        selection,
        ", ".join([spec.activation, *(f"{a} in {r}" for r, a in spec.activations.items())]),
        INSIDE_UNTESTED if inside else self_test.describe(choice, target, here),
        [
            *subject.remarks,
            *(notes_inside_vllm(selection, target) if inside else notes(spec, selection, target, gates)),
        ],
        rooms,
        Formats(subject.stored),
        _proof(subject, choice, target, gates, inside, progress) if prove else None,
    )


def _choose(subject: Explained, gates: Gates, target: Arch, inside: bool) -> PlanChoice:
    if inside:
        return choose_inside_vllm(subject.config, gates, target, subject.name)
    return choose(subject.config, gates, target, subject.stored)


def _rooms(
    subject: Explained, default: bool, target: Arch, cards: Sequence[Gpu], gates: Gates, here: bool
) -> list[Room]:
    """For the model, and for gpt-oss-20b where no model was named: on the named GPU, on all GPUs of the architecture,
    or on this machine."""
    shapes = [(subject.name, replace(load.read_facts(subject.model), formats=Formats(subject.stored)))]
    if default:
        shapes.append(("gpt-oss-20b", load.read_facts(load.resolve_model("random:20b"))))
    if here:
        device = load.resolve_device(None)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
        return rooms_in(name, read_memory(device), None, target, shapes, gates)
    cards = cards or [gpu for gpu in GPUS.values() if gpu.arch == target.name]
    return [room for gpu in cards for room in rooms_on(gpu, target, shapes, gates)]


def _proof(
    subject: Explained, choice: PlanChoice, target: Arch, gates: Gates, inside: bool, progress: Progress
) -> Proof:
    spec, chosen = choice.spec, choice.chosen
    evidence = gather(spec, chosen, target.name, gates, progress)
    siblings = compare(spec, chosen, target.name, gates, progress)
    groups = by_group(chosen, evidence)
    scaled = block_scaled(gates, target) if inside else None
    if scaled is None:
        return Proof(evidence, siblings, groups)
    other = _choose(subject, scaled, target, inside)
    more = gather(other.spec, other.chosen, target.name, scaled, progress)
    return Proof(evidence + more, siblings, groups, scaled, by_group(other.chosen, more))


def choose_inside_vllm(config: ModelConfig, gates: Gates, target: Arch, name: str) -> PlanChoice:
    """The choice that the plugin makes in each vLLM process; gates that vLLM's command line lacks are refused first."""
    vllm_command(name, gates).check()
    choice = vllm_layers.choose(Shapes.of_model(config), gates, target)
    selection = replace(choice.selection, notes=(choice.why,) if choice.why else ())
    return PlanChoice(choice.spec, choice.chosen, selection)


def notes_inside_vllm(selection: Selection, target: Arch) -> list[str]:
    """The kernel of each layer group in one line; operations that vLLM keeps are named vllm.*."""
    groups = {}
    for group in LAYER_GROUPS:
        names = [n for names in selection.chosen.values() for n in names if covers(n, group)]
        groups[group] = "/".join(dict.fromkeys(names))
    remarks = ["layer groups inside vLLM: " + ", ".join(f"{g} {k}" for g, k in groups.items()) + "."]
    remarks += [f"single operations are ours, not whole layers: {why}." for why in selection.notes]
    if any(kernel.startswith("vllm.") for kernel in groups.values()):
        remarks.append("vllm.* are vLLM's own kernels; --mxfp4-layers all runs every dense layer with ours, in MXFP4.")
    if not target.has_run:
        remarks.append(f"compiled and inspected for {target.name}, but not yet run on such a machine.")
    return remarks


def block_scaled(gates: Gates, target: Arch) -> Gates | None:
    """Gates with which every layer group uses block-scaled products, if the machine has them and no activation format
    is set: the default is bf16, whose products are not block-scaled."""
    if "block_scaled_mma_sync" not in target.features or gates.activation not in ("auto", "float"):
        return None
    plain = as_stored(gates).layers == Layers()
    return replace(gates, layers=Gates(layers="all").layers if plain else gates.layers, activation="mxfp8")  # type: ignore[arg-type]


def by_group(chosen: Chosen, evidence: Sequence[Evidence]) -> dict[str, str]:
    """The kernels of each layer group, with the matrix instructions in their machine code."""
    groups = {}
    for group in LAYER_GROUPS:
        names = dict.fromkeys(p.name for phases in chosen.values() for p in phases if group in p.covers)
        instructions = dict.fromkeys(i for e in evidence if e.phase in names for i in e.instructions)
        groups[group] = f"{'/'.join(names)}: {', '.join(instructions) or 'no matrix instruction'}"
    return groups


def covers(phase: str, group: str) -> bool:
    return any(p.name == phase and group in p.covers for p in (*vllm_selection.PHASES, *LAYER_PHASES))


def notes(spec: Spec, selection: Selection, target: Arch, gates: Gates) -> list[str]:
    """Remarks for owners of such a machine that the lists do not contain."""
    remarks = []
    if gates.deterministic == "on":
        remarks.append(DETERMINISTIC["gpu" if target.is_gpu else "cpu"])
    if not target.is_gpu:
        remark = cpu_remark(gates)
        return [*remarks, f"{remark}."] if remark else remarks
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
    if "block_scaled" in target.features and prompts == "bf16" and spec.matrices.kinds("gate_up") == ("mxfp4",):
        remarks.append(
            "prompts run on the bf16 tensor cores. --activation prefill=mxfp8 or prefill=mxfp4 takes the block-scaled "
            "FP4 ones, and rounds activations (docs/numerics.md)."
        )
    if not target.has_run:
        ran = f", except {target.partly_run}" if target.partly_run else ""
        remarks.append(
            f"these kernels are compiled and inspected for {target.name}, but have not run on such a machine yet{ran}."
        )
    return remarks


def machine_of(text: str) -> tuple[Arch, list[Gpu]]:
    """The architecture with this name, or that of the GPU with this name and the GPU itself."""
    if text.lower() in ARCHES:
        return ARCHES[text.lower()], []
    try:
        gpu = gpu_named(text)
    except UsageError:
        names = ", ".join([*ARCHES, *GPUS])
        raise UsageError(f"there is no architecture and no GPU {text!r}; use one of {names}.") from None
    return ARCHES[gpu.arch], [gpu]


def rooms_on(gpu: Gpu, arch: Arch, shapes: Sequence[tuple[str, CheckpointFacts]], gates: Gates) -> list[Room]:
    """What is left for the KV cache on a GPU of the table. Its host may have any amount of memory."""
    size = int(gpu.memory)
    state = MemoryState(total=size, available=size, unified=True) if gpu.unified else card_state(size)
    return rooms_in(f"{gpu.name} ({gpu.memory_text})", state, gpu, arch, shapes, gates)


def card_state(size: int) -> MemoryState:
    """A GPU with so much memory of its own, all of it free, in a host with any amount."""
    return MemoryState(total=ANY_HOST, available=ANY_HOST, device_total=size, device_free=size)


def rooms_in(
    machine: str,
    state: MemoryState,
    gpu: Gpu | None,
    arch: Arch,
    shapes: Sequence[tuple[str, CheckpointFacts]],
    gates: Gates,
) -> list[Room]:
    """What is left for the KV cache in a memory, from the account that a start is checked with."""
    rooms = []
    for name, facts in shapes:
        config = facts.config
        try:
            placement = find_placement(facts, EngineOptions(gates=gates), state, arch)
        except NotEnoughMemoryError as e:  # neither memory has room
            nowhere = Placement(gates, config.layers, 0, facts.weight_bytes(gates, arch), 0)
            rooms.append(Room(machine, gpu, name, 0.0, config.max_context, f"{machine}, {name}: {e}", nowhere))
            continue
        weights = placement.device_bytes
        page = page_bytes(config, choose(config, gates, arch).spec)
        options = EngineOptions(gates=placement.gates)  # and the account, as `serve` asks
        options = with_fitting_steps(config, options, state, page, weights=weights, own_process=True)
        account = memory_account(config, options, state, weights=weights, own_process=True)
        limits = page_limits(config, options, state, page)
        head = f"{machine}, {name}: {placement.line or f'weights {gib(weights)}'}"
        contexts = 0.0
        if account.kv_room < limits.least * page:
            short = limits.least * page - account.kv_room
            line = f"{head}: does not fit, one context of {config.max_context} tokens is {gib(short)} short"
        else:
            contexts = (account.kv_room // page - 1) / (limits.least - 1)
            line = (
                f"{head}, workspace {gib(account.workspace)}, reserve {gib(account.reserve)}: {gib(account.kv_room)} "
                f"are left for KV, {contexts:.1f} contexts of {config.max_context} tokens"
            )
        rooms.append(Room(machine, gpu, name, contexts, config.max_context, line, placement))
    return rooms


def fits(facts: CheckpointFacts, options: EngineOptions, state: MemoryState, arch: Arch, weights: int) -> bool:
    """Whether so many bytes of weights leave room for one context, as a start is checked."""
    config = facts.config
    page = page_bytes(config, choose(config, replace(options.gates, experts_in_host="auto"), arch).spec)
    options = with_fitting_steps(config, options, state, page, weights=weights, own_process=True)
    account = memory_account(config, options, state, weights=weights, own_process=True)
    return page_limits(config, options, state, page).least * page <= account.kv_room


def compare(spec: Spec, chosen: Chosen, arch: str, gates: Gates, progress: Progress) -> list[Sibling]:
    """The machine code of every chosen phase compared with that of its sibling."""
    siblings: dict[str, Sibling] = {}
    runs = {(p.name, spec.at(regime).activation): spec.at(regime) for regime, phases in chosen.items() for p in phases}
    for (name, _), at_regime in runs.items():
        if ARCHES[arch].sibling and name in proof.compilable():
            progress(f"comparing {name} for {arch} and {ARCHES[arch].sibling}")
            siblings |= {s.kernel: s for s in proof.compare_siblings(name, arch, at_regime, gates)}
    return list(siblings.values())


def gather(spec: Spec, chosen: Chosen, arch: str, gates: Gates, progress: Progress) -> list[Evidence]:
    """Evidence for every chosen phase that can be compiled here."""
    evidence: list[Evidence] = []
    provable = set(proof.compilable(lent=True))
    runs = {(p.name, spec.at(regime).activation): spec.at(regime) for regime, phases in chosen.items() for p in phases}
    for (name, _), at_regime in runs.items():
        if name in provable:
            progress(f"compiling {name} for {arch}")
            evidence += proof.prove(name, arch, at_regime, gates)
    return evidence
