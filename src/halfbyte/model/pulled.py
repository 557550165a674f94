"""Models by the name that people give them: which repository `20b` means, and what `halfbyte pull` has fetched of it.

Reads the records that a pull leaves in its folders, never the weights. A folder is known by its place in the models
folder; what was pulled to another place (`--to`) has a link there. Only what a pull has fetched is ever removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.model.checksums import RECORD, PullRecord, read_record
from halfbyte.model.gguf_metadata import SPLIT

NAMES = {
    "20b": "openai/gpt-oss-20b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "120b": "openai/gpt-oss-120b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gpt-oss:120b": "openai/gpt-oss-120b",
}
_PUNCTUATION = str.maketrans("", "", "-_.")


def repository(text: str) -> str | None:
    """The repository on the hub that `text` names; None where it can be no such name."""
    repo = NAMES.get(text.lower(), text)
    parts = repo.split("/")
    if len(parts) == 2 and all(p.strip(".") and p.isascii() and p.translate(_PUNCTUATION).isalnum() for p in parts):
        return repo
    return None


def named_file(text: str) -> tuple[str, str | None]:
    """`owner/name/some.gguf` is one file of a repository: (owner/name, some.gguf)."""
    owner, _, rest = text.partition("/")
    name, _, file = rest.partition("/")
    return (f"{owner}/{name}", file) if file.endswith(".gguf") else (text, None)


def default_folder(repo: str, models: Path) -> Path:
    """The folder of a repository's files, or a link to it."""
    return models / repo.replace("/", "--")


def link(repo: str, folder: Path, models: Path) -> None:
    """Link a model that was pulled to `folder` into `models` under its name, unless files of its own are there."""
    target = default_folder(repo, models)
    if target.is_symlink():
        target.unlink()
    if not target.exists() and target != folder:
        models.mkdir(parents=True, exist_ok=True)
        target.symlink_to(folder.absolute(), target_is_directory=True)


@dataclass(frozen=True)
class PulledModel:
    repo: str
    folder: Path  # in the models folder; a link where it was pulled elsewhere
    record: PullRecord
    size: int  # bytes on disk
    complete: bool

    @property
    def fetched(self) -> float | None:
        """When, in seconds since 1970."""
        record = self.folder / RECORD
        return record.stat().st_mtime if record.exists() else None


def pulled_models(models: Path) -> list[PulledModel]:
    """Everything a pull has put into the models folder or linked from there, by name."""
    if not models.is_dir():
        return []
    folders = sorted(p for p in models.iterdir() if "--" in p.name and p.is_dir())
    return [model for folder in folders if (model := _look(folder)) is not None]


def find(text: str, models: Path) -> PulledModel | None:
    """The model that was pulled under this name, complete or not."""
    repo = repository(named_file(text)[0])
    folder = None if repo is None else default_folder(repo, models)
    return None if folder is None or not folder.is_dir() else _look(folder)


def path_of(text: str, models: Path) -> Path | None:
    """The path to open for a name, a folder or a GGUF file; None where it was not pulled completely."""
    model, (_, file) = find(text, models), named_file(text)
    if model is None or not model.complete or (file is not None and file not in model.record.files):
        return None
    return opened(model.folder, list(model.record.files), file)


def opened(folder: Path, files: Sequence[str], file: str | None = None) -> Path:
    """The path to open in a pulled folder: the folder, or its one GGUF file."""
    if file is not None:
        return folder / file
    gguf = [f for f in files if f.endswith(".gguf")]
    if not gguf or len(gguf) < len(files):
        return folder
    models_by_stem = {m["stem"] if (m := SPLIT.match(f)) else f: f for f in sorted(gguf, reverse=True)}
    if len(models_by_stem) > 1:
        raise CheckpointError(f"{folder} holds several models; add the name of one: {', '.join(sorted(gguf))}.")
    return folder / next(iter(models_by_stem.values()))


def remove(model: PulledModel) -> list[Path]:
    """Delete a model's files; returns the files that stay because no pull had written them."""
    if not model.folder.is_symlink():
        shutil.rmtree(model.folder)
        return []
    target = model.folder.resolve()
    for name in (*model.record.files, RECORD):
        path = target / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise UsageError(f"{target / RECORD} names {name!r}, which is not in its folder; remove {target} by hand.")
        path.unlink(missing_ok=True)
    model.folder.unlink()
    left = [p for p in target.rglob("*") if p.is_file()]
    if not left:
        shutil.rmtree(target)
    return left


def _look(folder: Path) -> PulledModel | None:
    """None where no pull was at work."""
    owner, _, name = folder.name.partition("--")
    try:
        record = read_record(folder)
    except CheckpointError:
        record = PullRecord()
    files = [p for p in folder.rglob("*") if p.is_file()]
    if not record.files and not any(p.suffix == ".part" for p in files):
        return None
    complete = bool(record.files) and all(_has(folder / n, f.size) for n, f in record.files.items())
    return PulledModel(f"{owner}/{name}", folder, record, sum(p.stat().st_size for p in files), complete)


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
