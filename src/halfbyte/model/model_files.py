"""Which file or folder a path means, and sentences for folders that hold something else than a model.

The parts of a split GGUF mean its first part, a folder with one GGUF model means that model, and a repository in
Hugging Face's cache means its snapshot. Nothing here reads a tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.model.gguf_metadata import SPLIT
from halfbyte.model.json_records import read_json
from halfbyte.model.plain_file import MIB, quote

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
ANY_MODEL = "give a Hugging Face model folder, or a .gguf file"


def model_path(path: Path) -> Path:
    """The model folder, or the first file of the GGUF model, that a path means; refuses a folder that holds none."""
    if not path.is_dir():
        return first_part(path)
    if (path / CONFIG).exists():
        return path
    models = sorted({first_part(file) for file in path.glob("*.gguf")})
    if len(models) == 1:
        return models[0]
    if models:
        raise CheckpointError(f"{path} is a folder of GGUF files; give one of them, for example {models[0].name}.")
    snapshots = sorted(p for p in (path / "snapshots").glob("*") if p.is_dir())
    if len(snapshots) == 1:
        return model_path(snapshots[0])
    if snapshots:
        raise CheckpointError(
            f"{path} is a repository with {len(snapshots)} snapshots in Hugging Face's cache; give one of them, for"
            f" example {snapshots[0]}."
        )
    if (path / ADAPTER).exists():
        raise adapter_folder(path)
    raise CheckpointError(f"{path / CONFIG} does not exist; {ANY_MODEL}.")


def first_part(path: Path) -> Path:
    """Part 1 of a split GGUF, which has the metadata and the vocabulary, if it is there; another file is its own."""
    match = SPLIT.match(path.name)
    if match is None:
        return path
    first = path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")
    return first if first.exists() else path


def adapter_folder(path: Path) -> CheckpointError:
    base = read_json(path / ADAPTER, dict[str, Any], MIB).get("base_model_name_or_path")
    of = f" of {quote(base)}" if isinstance(base, str) else ""
    return CheckpointError(
        f"{path} is a LoRA adapter{of}, not a model; merge it into its base model (peft's merge_and_unload, then"
        " save_pretrained) and give the merged folder."
    )


def not_gpt_oss(where: str, raw: dict[str, Any]) -> CheckpointError:
    """For a config.json whose model_type is not gpt_oss."""
    folder = Path(where).parent
    if "model_type" not in raw and {"num_experts", "experts_per_token", "swiglu_limit"} <= raw.keys():
        return CheckpointError(
            f"{folder} holds OpenAI's own layout (original/); give the folder above it, {folder.parent}, with"
            " config.json and model-*.safetensors."
        )
    kind = quote(str(raw.get("model_type")))
    return CheckpointError(f"{where}: model_type is {kind}, but halfbyte serves gpt_oss models only.")
