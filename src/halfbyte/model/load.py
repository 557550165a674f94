"""From what a person types to a model that runs: a folder, a GGUF file, what `halfbyte pull` fetched by its name, the
embedded model, or random weights.

The plan is chosen before anything is read, so that every weight is laid out once, on its device, as its kernel wants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats import FORMATS, bytes_for
from halfbyte.gates import Gates, models_folder
from halfbyte.model import checkpoint, pulled, synthetic
from halfbyte.model import self_test as tests
from halfbyte.model.config import NAMED, PAGE_SIZE, ModelConfig
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, GptOss, arch_of, choose, formats_after
from halfbyte.model.plain_file import refusing, shown
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weights import DTYPES, GROUPS, Source, WeightFormat, roles, shape_of
from halfbyte.plan.compilation import Compilation

RANDOM = "random:"


def _embedded() -> Path:
    """Beside the sources in a checkout, among the package's data in an installation."""
    checkout = Path(__file__).parents[3] / "models" / "tiny"
    return checkout if checkout.exists() else Path(__file__).parents[1] / "data" / "models" / "tiny"


EMBEDDED = _embedded()


@dataclass(frozen=True)
class ModelName:
    """What was asked for. Exactly one of `path` and `random` is set."""

    text: str
    path: Path | None = None
    random: str | None = None
    repo: str | None = None  # where it was pulled from, if it was asked for by that name

    @property
    def label(self) -> str:
        if self.random:
            return self.text
        path = self.path or EMBEDDED
        return self.repo.partition("/")[2] if self.repo and path.is_dir() else path.name


def resolve_model(text: str | None) -> ModelName:
    """None: the embedded model. `random:120b`: random weights of a true shape. A path wins over a name."""
    if text is None or (text == EMBEDDED.name and not Path(text).exists()):
        if not (EMBEDDED / "config.json").exists():
            raise CheckpointError("the embedded model is not in this installation; name a model folder or GGUF file.")
        return ModelName("embedded", path=EMBEDDED)
    if text.startswith(RANDOM):
        shape = text.removeprefix(RANDOM)
        if shape not in NAMED:
            raise UsageError(f"there is no shape {shape!r}; use {RANDOM}{f', {RANDOM}'.join(NAMED)}.")
        return ModelName(text, random=shape)
    with refusing(shown(text)):
        path = Path(text).expanduser()
        if path.exists():
            return ModelName(text, path=path)
    repo = pulled.repository(pulled.named_file(text)[0])
    if repo is not None and (found := pulled.path_of(text, models_folder())) is not None:
        return ModelName(text, path=found, repo=repo)
    if repo is not None:
        raise CheckpointError(
            f"{text} does not exist here and has not been pulled; fetch it with `halfbyte pull {text}`, or give a model"
            " folder or a .gguf file."
        )
    raise CheckpointError(
        f"{text} does not exist; give a model folder, a .gguf file, the name of a model that was pulled, or"
        f" {RANDOM}20b for random weights."
    )


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


def config_of(name: ModelName) -> ModelConfig:
    return NAMED[name.random] if name.random else checkpoint.read_config(name.path or EMBEDDED)


def formats_of(source: Source) -> dict[str, str]:
    """Role -> the format a checkpoint holds it in."""
    return {role: source.formats(None if role in ("lm_head", "embed") else 0, role)[0] for role in (*GROUPS, "embed")}


def stored_formats(name: ModelName) -> dict[str, str]:
    """Role -> the format that a model's file holds it in; random weights are made as gpt-oss's checkpoints are."""
    if name.path is None:
        return dict(CHECKPOINT_FORMATS)
    source = checkpoint.open_model(name.path)
    try:
        return formats_of(source)
    finally:
        source.close()


def weight_bytes(name: ModelName, gates: Gates) -> int:
    """What the weights will take once loaded as the gates say."""
    config, formats = config_of(name), formats_after(gates, stored_formats(name))
    total = 0
    for _, role in roles(config):
        format = formats.get(role, "bf16")
        count = math.prod(shape_of(config, role))
        total += (
            bytes_for(shape_of(config, role), format)
            if format in FORMATS
            else count * DTYPES[cast(WeightFormat, format)].itemsize
        )
    return total


def load_model(
    name: ModelName,
    gates: Gates | None = None,
    *,
    device: torch.device | str = "cpu",
    page_size: int = PAGE_SIZE,
    progress: checkpoint.Progress | None = None,
    allow_nan: bool = False,
    self_test: str = "auto",
    keep_cached: bool = True,
) -> GptOss:
    """Weights on the device in the plan's layouts, and the plan bound to them; kernels that are new here are tested."""
    gates = gates or Gates()
    device = torch.device(device)
    arch = arch_of(device)
    if name.random:
        config = NAMED[name.random]
        choice = choose(config, gates, arch, page_size=page_size)
        tests.ensure(config, choice, arch, gates, device, self_test)
        compilation = Compilation(choice[0], choice[1], arch)
        weights = synthetic.make(
            config, 0, device=device, layer_formats=gates.layer_formats, layouts=choice[2].layouts, progress=progress
        )
    else:
        assert name.path is not None
        source = checkpoint.open_model(name.path)
        try:
            config, stored = source.config, formats_of(source)
        finally:
            source.close()
        choice = choose(config, gates, arch, stored, page_size)
        tests.ensure(config, choice, arch, gates, device, self_test)
        compilation = Compilation(choice[0], choice[1], arch)
        packers = (phase.packer(gates) for phases in choice[1].values() for phase in phases)
        weights = checkpoint.load(
            name.path, device=device, layer_formats=gates.layer_formats, layouts=choice[2].layouts,
            packer=next((p for p in packers if p is not None), None), progress=progress, allow_nan=allow_nan,
            keep_cached=keep_cached,
        )  # fmt: skip
    compilation.wait()
    model = GptOss(weights, gates, page_size=page_size, choice=choice)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # room that repacking took belongs to the KV pages now
    return model
