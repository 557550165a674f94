"""Turn what the training stages saved into the shipped folders. `python training/release.py OUT` on any machine.

Writes models/tiny (MXFP4 experts, bf16 elsewhere), models/tiny-draft and models/tiny-eagle3 from whichever of
weights-N.safetensors, draft-weights.safetensors and eagle3.safetensors are in OUT. Scores are not written here: the
model cards get them from the commands they name.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import checkpoint
import eagle
import vocabulary
from network import GptOss
from train import DRAFT, SECOND, SECOND_DRAFT, TINY

from halfbyte.model.config import ModelConfig


def release(source: Path, models: Path, target: ModelConfig | None = None, small: ModelConfig = DRAFT) -> list[Path]:
    """`target`: the network that the weights are of; None: the first edition. `small`: that of the draft model."""
    written, target = [], target or TINY
    if any(source.glob("weights-*.safetensors")):
        model = GptOss(target)
        checkpoint.load_weights(model, source)
        checkpoint.export(model, models / "tiny")
        vocabulary.save_config(models / "tiny", target.max_context)
        written.append(models / "tiny")
    draft = source / "draft-weights.safetensors"
    if draft.exists():
        model = GptOss(small)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(draft, Path(folder) / "weights-0.safetensors")
            checkpoint.load_weights(model, Path(folder))
        checkpoint.export(model, models / "tiny-draft")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(models / "tiny" / name, models / "tiny-draft" / name)
        written.append(models / "tiny-draft")
    if (source / "eagle3.safetensors").exists():
        eagle.export(source, target, models / "tiny-eagle3")
        written.append(models / "tiny-eagle3")
    if not written:
        raise SystemExit(f"{source} holds no weights; run training/reproduce.sh on a CUDA machine first")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--edition", type=int, choices=[1, 2], default=1, help="whose network the weights are of")
    args = parser.parse_args()
    networks = (SECOND, SECOND_DRAFT) if args.edition == 2 else (TINY, DRAFT)
    for folder in release(args.source, args.models, *networks):
        size = sum(f.stat().st_size for f in folder.iterdir())
        print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
