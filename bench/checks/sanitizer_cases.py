"""The work that compute-sanitizer watches: a model of a few megabytes through every regime of a plan, or the sampler.

Small, because racecheck makes a kernel a hundred times slower, and one whose blocks wait for each other gives a wait up
after seconds: two layers, a prompt that passes the window, a batch, one and three rows, a prompt over a cache. It only
looks whether every number is finite and whether the kernels of the plan ran; how close they are to the reference is
what the GPU tests ask. Refuses nothing silently: a case that this GPU has no kernels for ends with 3 and says so.
"""

from __future__ import annotations

import torch

from halfbyte import gates
from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles
from halfbyte.kernels.cuda.device.host import gpu
from halfbyte.kernels.cuda.sampling.sampler import CudaSampler
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import GptOss, arch_of, choose
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.ops.sampling_settings import SamplingSettings, row_of

SMALL = ModelConfig(
    layers=2, hidden=128, intermediate=128, experts=32, top_k=4, heads=8, kv_heads=1, head_dim=64, vocab=256,
    window=64, max_context=1024, yarn=Yarn(factor=8.0, original_context=128), eos_tokens=(1,), pad_token=0,
    name="small",
)  # fmt: skip
CHUNKS = (80, 9, 1, 3, 70)  # a prompt, a batch, decode, three drafts, a prompt over a cache
TRITON = {"moe_kernel": "triton", "linear_kernel": "triton", "attention": "triton"}
SAMPLER = "sampler"
# Name -> preset and flags. Between them they launch every kernel that a plan of this GPU can have.
PLANS: dict[str, tuple[str, dict[str, str]]] = {
    "exact": ("exact", {}),
    "balanced": ("balanced", {}),
    "fast": ("fast", {}),
    "fast-fp8-cache": ("fast", {"kv_dtype": "fp8", "moe_kernel": "decode=gemv"}),
    "fast-grouped": ("fast", {"attention": "triton"}),  # the grouped products for few rows, too
    "fast-fp8": ("fast", {"activation": "fp8"}),
    "fast-mxfp8": ("fast", {"activation": "mxfp8"}),
    "fast-mxfp4": ("fast", {"activation": "mxfp4", "kv_dtype": "fp8"}),
    "triton": ("exact", TRITON),
    "triton-q8-int8": ("balanced", TRITON | {"activation": "int8"}),
    "triton-mxfp4": ("fast", TRITON),
}
CASES = (*PLANS, SAMPLER)
NO_KERNEL = 3


def run_plan(name: str, device: str) -> list[str]:
    """Names of the phases that ran. Weights are drawn on the host: torch's kernels are not what is watched."""
    preset, flags = PLANS[name]
    g = gates.parse(flags, env={}, preset=preset)
    choice = choose(SMALL, g, arch_of(device))
    weights = synthetic.make(SMALL, 3, layer_formats=g.layer_formats)
    for layer, role, tensor in list(weights.items()):
        assert not isinstance(tensor, DenseTiles)
        setattr(weights if layer is None else weights.layers[layer], role, tensor.to(device))
    model = GptOss(
        checkpoint.assemble(checkpoint.MemorySource(weights), layouts=choice.selection.layouts), g, choice=choice
    )
    sequence = SingleSequence(model, 320)
    tokens = torch.randint(0, SMALL.vocab, (sum(CHUNKS),), generator=torch.Generator().manual_seed(0)).tolist()
    at = 0
    with torch.inference_mode():
        for rows in CHUNKS:
            logits = sequence.feed(tokens[at : at + rows], all_logits=True)
            if not torch.isfinite(logits.cpu()).all():
                raise SystemExit(f"{name}: the logits of {rows} rows from {at} on are not all finite.")
            at += rows
    if differences := model.plan.differences():
        raise SystemExit(f"{name}: {'; '.join(map(str, differences))}")
    return sorted(model.plan.record.phases())


def run_sampler(sampler: CudaSampler, device: str) -> list[str]:
    """The highest logit, samples with and without filters, and a row shared by several blocks."""
    random = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, 3001, generator=random) * 3).to(device)
    settings = torch.tensor([row_of(SamplingSettings(*s)) for s in FILTERS]).to(device)
    keys = torch.randint(-(2**63), 2**63 - 1, (5,), generator=random).to(device)
    results = torch.zeros(5, 2, dtype=torch.int32).to(device)
    for filtered in (False, True):
        sampler.argmax(logits, results)
        if not torch.equal(results[:, 0].cpu(), logits.cpu().argmax(1).int()):
            raise SystemExit("sampler: another token than the highest logit's was noted.")
        sampler.sample(logits, settings, keys, results, filtered=filtered)
        if not bool(((results[:, 0] >= 0) & (results[:, 0] < 3001)).all()):
            raise SystemExit("sampler: a token lies outside of the vocabulary.")
    return [sampler.name]


FILTERS: list[tuple[float, int, float, float]] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 40, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 7, 0.8, 0.05),
]


def run_case(name: str) -> int:
    """In a process of its own, which ends with NO_KERNEL where this GPU has no kernels for it."""
    try:
        if name == SAMPLER:
            sampler = CudaSampler(gpu(), 5, 3001, torch.device("cuda"))
            sampler.cutoff_least = 700
            ran = run_sampler(sampler, "cuda")
        else:
            ran = run_plan(name, "cuda")
    except PlanError as refusal:
        print(refusal)
        raise SystemExit(NO_KERNEL) from None
    torch.cuda.synchronize()
    print(f"{name} ran {', '.join(ran)}")
    return 0
