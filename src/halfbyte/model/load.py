"""From the name of a model to one that runs: a folder, a GGUF file, a model that `halfbyte pull` fetched, the embedded
model, or random weights. `CheckpointFacts` is what everything else needs to know of it.

The plan is chosen before anything is read, so that every weight is laid out once, on its device, as its kernel wants.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats import FORMATS, bytes_for
from halfbyte.formats.matrices import Formats
from halfbyte.gates import Gates, models_folder
from halfbyte.model import checkpoint, pulled, synthetic
from halfbyte.model import self_test as tests
from halfbyte.model.config import NAMED, PAGE_SIZE, ModelConfig
from halfbyte.model.direct import HOST_ROLES, HostExperts
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, GptOss, arch_of, choose, formats_after, resolved
from halfbyte.model.model_files import model_path
from halfbyte.model.plain_file import quote, refusing
from halfbyte.model.scales import scan_model
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weights import DTYPES, Source, WeightFormat, roles, shape_of
from halfbyte.plan.phase import Arch
from halfbyte.plan.plan import Compilation
from halfbyte.plan.select import PlanChoice

RANDOM = "random:"
REQUANTISED = (
    "the experts are %s, and become MXFP4 on %s: a relative error of some 11 %% in their weights, none if they were "
    "MXFP4 before. --layers moe=checkpoint keeps bf16 and q8 as they are, for slower kernels."
)
EXPERT_ERROR = "the experts' weights changed by %.2g %% (relative error)%s."
WIDE_ROWS = (
    "fp8 products cannot hold the MXFP4 scales of some rows, so these are multiplied with bf16 activations: %s%s. "
    "--activation bf16 does so everywhere."
)
log = logging.getLogger("halfbyte")


def _embedded() -> Path:
    """Beside the sources in a checkout, among the package's data in an installation."""
    checkout = Path(__file__).parents[3] / "models" / "tiny"
    return checkout if checkout.exists() else Path(__file__).parents[1] / "data" / "models" / "tiny"


EMBEDDED = _embedded()


@dataclass(frozen=True)
class ModelName:
    """A model as it was named. Exactly one of `path` and `random` is set."""

    text: str
    path: Path | None = None
    random: str | None = None
    character: synthetic.Character = synthetic.TAME  # of random weights
    repo: str | None = None  # where it was pulled from, if it was asked for by that name

    @property
    def label(self) -> str:
        if self.random:
            return self.text
        path = self.path or EMBEDDED
        return self.repo.partition("/")[2] if self.repo and path.is_dir() else path.name

    @property
    def shape_name(self) -> str:
        """The name of the model in a measured cell: random weights of a shape are named after the shape."""
        return self.random or self.label


def resolve_model(text: str | None) -> ModelName:
    """None: the embedded model. `random:120b`: random weights of a true shape. A path wins over a name."""
    if text is None or (text == EMBEDDED.name and not Path(text).exists()):
        if not (EMBEDDED / "config.json").exists():
            raise CheckpointError("the embedded model is not in this installation; name a model folder or GGUF file.")
        return ModelName("embedded", path=EMBEDDED)
    if text.startswith(RANDOM):
        shape, _, options = text.removeprefix(RANDOM).partition("?")
        if shape not in NAMED:
            raise UsageError(f"there is no shape {shape!r}; use {RANDOM}{f', {RANDOM}'.join(NAMED)}.")
        return ModelName(text, random=shape, character=_character(options))
    with refusing(quote(text)):
        path = Path(text).expanduser()
        if path.exists():
            return ModelName(text, path=model_path(path))
    repo = pulled.repository(pulled.named_file(text)[0])
    if repo is not None and (folder := pulled.path_of(text, models_folder())) is not None:
        return ModelName(text, path=folder, repo=repo)
    if repo is not None:
        raise CheckpointError(
            f"{text} does not exist here and has not been pulled; fetch it with `halfbyte pull {text}`, or give a model"
            " folder or a .gguf file."
        )
    raise CheckpointError(
        f"{text} does not exist; give a model folder, a .gguf file, the name of a model that was pulled, or"
        f" {RANDOM}20b for random weights."
    )


def _character(options: str) -> synthetic.Character:
    """`weights=tame&skew=0.6`, in any order; empty: weights like real ones and even routing."""
    character = synthetic.REAL
    for option in filter(None, options.split("&")):
        key, _, value = option.partition("=")
        if key == "weights" and value in ("real", "tame"):
            character = replace(character, real=value == "real")
        elif key == "skew" and re.fullmatch(r"[0-4](\.[0-9]+)?", value):
            character = replace(character, skew=float(value))
        else:
            raise UsageError(
                f"{quote(option)} is not an option of random weights; use {RANDOM}120b?weights=tame, or skew=0.6 (0 to "
                "4), joined by &."
            )
    return character


def resolve_device(text: str | None) -> torch.device:
    if text is None or text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"there is no device {text!r}; use cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA GPU is visible here; use --device cpu.")
    return device


def tokenizer_of(name: ModelName) -> Tokenizer:
    """The model's vocabulary; random weights of a true shape speak gpt-oss's."""
    return Tokenizer.for_model(name.path) if name.path is not None else Tokenizer.gpt_oss()


@dataclass(frozen=True)
class CheckpointFacts:
    """The facts in a model's headers, known before a weight is read; the record that all other code takes."""

    name: ModelName
    config: ModelConfig
    formats: Formats  # matrix -> the format it is stored in; vectors only where they are not bf16

    def weight_bytes(self, gates: Gates, arch: Arch | None = None) -> int:
        """The bytes that the weights will take once they are loaded as the gates say."""
        formats = formats_after(self.config, gates, self.formats, arch)
        return sum(self._bytes(formats, layer, role) for layer, role in roles(self.config))

    def expert_bytes(self, gates: Gates, arch: Arch | None, layers: int) -> int:
        """The bytes of `weight_bytes` that are experts of the first layers."""
        formats = formats_after(self.config, gates, self.formats, arch)
        return sum(self._bytes(formats, layer, role) for layer in range(layers) for role in HOST_ROLES)

    def _bytes(self, formats: Formats, layer: int | None, role: str) -> int:
        shape, format = shape_of(self.config, role), formats.of(role, layer) if role in formats else "bf16"
        if format in FORMATS:
            return bytes_for(shape, format)
        return math.prod(shape) * DTYPES[cast(WeightFormat, format)].itemsize


class OpenCheckpoint:
    """A model whose files are open and checked: its facts at once, its tokenizer and weights on demand.

    A process opens a model once and closes it when it has read what it needs. Random weights of a true shape are made
    as gpt-oss's checkpoints are, and have no files.
    """

    def __init__(self, name: ModelName) -> None:
        if name.random:
            self.source, config, formats = None, NAMED[name.random], Formats(CHECKPOINT_FORMATS)
        else:
            self.source = source = checkpoint.open_model(name.path or EMBEDDED)
            config, formats = source.config, formats_in(source)
        self.facts = CheckpointFacts(name, config, formats)

    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary; random weights of a true shape speak gpt-oss's."""
        return Tokenizer.gpt_oss() if self.source is None else self.source.tokenizer()

    def close(self) -> None:
        if self.source is not None:
            self.source.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def formats_in(source: Source) -> Formats:
    """The format of every matrix, by its first part; vector or router -> f32, if any layer's is."""
    wide: dict[str, str] = {}
    matrices: dict[str, list[str]] = {}
    for layer, role in roles(source.config):
        if role in CHECKPOINT_FORMATS:
            matrices.setdefault(role, []).append(source.formats(layer, role)[0])
        elif "f32" in source.formats(layer, role):
            wide[role] = "f32"
    return Formats(wide, matrices)


def read_facts(name: ModelName) -> CheckpointFacts:
    with OpenCheckpoint(name) as opened:
        return opened.facts


def config_of(name: ModelName) -> ModelConfig:
    return read_facts(name).config


def weight_bytes(name: ModelName, gates: Gates, arch: Arch | None = None) -> int:
    return read_facts(name).weight_bytes(gates, arch)


def wide_rows(model: OpenCheckpoint, choice: PlanChoice) -> list[str]:
    """The tensors of a model's files with rows whose MXFP4 scales a chosen kernel cannot hold together, before any
    weight is laid out. Scales are read only if there is such a kernel, and the scan is cached."""
    limits = [phase.row_octaves for phases in choice.chosen.values() for phase in phases]
    octaves = min((limit for limit in limits if limit is not None), default=None)
    if octaves is None or model.source is None:
        return []
    scans = scan_model(model.facts.name.path or EMBEDDED, model.source)
    return [f"layer {t.layer} {t.role} ({t.row_spread} octaves)" for t in scans if t.row_spread > octaves]


def half_rows(choice: PlanChoice, arch: Arch) -> bool:
    """Whether a plan multiplies float16 rows with q8, so that norms and values need a size that float16 holds."""
    return arch.is_gpu and any("q8" in choice.spec.matrices.kinds(role) for role in ("qkv", "o", "lm_head"))


def host_experts(choice: PlanChoice, gates: Gates) -> HostExperts | None:
    """The experts that a plan keeps in host memory, with the packer of the phase that reads them."""
    if not choice.spec.host_layers:
        return None
    phase = next(p for phases in choice.chosen.values() for p in phases if p.host_experts)
    return HostExperts(choice.spec.host_layers, phase.packer(gates))


def load_model(
    model: ModelName | OpenCheckpoint,
    gates: Gates | None = None,
    *,
    device: torch.device | str = "cpu",
    page_size: int = PAGE_SIZE,
    progress: checkpoint.Progress | None = None,
    allow_nan: bool = False,
    self_test: str = "auto",
    keep_cached: bool = True,
) -> GptOss:
    """Weights on the device in the plan's layouts, and the plan bound to them; kernels that are new here are tested.
    A checkpoint that was open before stays open."""
    if isinstance(model, ModelName):
        with OpenCheckpoint(model) as opened:
            return load_model(
                opened, gates, device=device, page_size=page_size, progress=progress, allow_nan=allow_nan,
                self_test=self_test, keep_cached=keep_cached,
            )  # fmt: skip
    device = torch.device(device)
    arch = arch_of(device)
    config = model.facts.config
    gates = resolved(gates or Gates(), model.facts.formats, arch)
    choice = choose(config, gates, arch, model.facts.formats, page_size)
    if wide := wide_rows(model, choice):
        log.warning(WIDE_ROWS, "; ".join(wide[:6]), f" and {len(wide) - 6} more" if len(wide) > 6 else "")
    tests.ensure(config, choice, arch, gates, device, self_test)
    compilation = Compilation(choice.spec, choice.chosen, arch)
    layouts, formats = choice.selection.layouts, choice.spec.formats
    layer_formats = gates.layer_formats | {"embed": formats["embed"]}
    experts = {form for role in ("gate_up", "down") for form in model.facts.formats.kinds(role)}
    planned = {form for role in ("gate_up", "down") for form in choice.spec.matrices.kinds(role)}
    if gates.layers.moe == "auto" and (arch.is_gpu or experts != planned):
        layer_formats["moe"] = "mxfp4"
        if experts != {"mxfp4"}:
            log.warning(REQUANTISED, " and ".join(sorted(experts)), arch.name)
    fp8_cache = choice.spec.kv_dtype == "fp8"
    host = host_experts(choice, gates)
    if model.source is None:
        weights = synthetic.make(
            config,
            0,
            device=device,
            layer_formats=layer_formats,
            layouts=layouts,
            progress=progress,
            character=model.facts.name.character,
            scale_heads=fp8_cache,
            host=host,
        )
    else:
        packers = (
            phase.packer(gates) for phases in choice.chosen.values() for phase in phases if not phase.host_experts
        )
        weights = checkpoint.load(
            model.source, device=device, layer_formats=layer_formats, layouts=layouts,
            packer=next((p for p in packers if p is not None), None), progress=progress, allow_nan=allow_nan,
            keep_cached=keep_cached, scale_heads=fp8_cache, half_rows=half_rows(choice, arch), host=host,
        )  # fmt: skip
    if weights.expert_error is not None:
        before = ": they were MXFP4 before" if weights.expert_error == 0 else ""
        log.warning(EXPERT_ERROR, 100 * weights.expert_error, before)
    compilation.wait()
    network = GptOss(weights, gates, page_size=page_size, choice=choice)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory that repacking took belongs to the KV pages now
    return network
