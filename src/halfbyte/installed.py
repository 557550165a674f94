"""What is installed here: versions, which copy of a package an import takes, which others it hides, and of which commit
this copy of halfbyte is.

A wheel's build records its commit (`setup.py`); a checkout asks git. Where things lie is told as far as another reader
can use it (in the checkout, in the environment, at home), not as a path of this machine. Imports nothing it looks for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfbyte.gates import child_environment

PACKAGE = Path(__file__).parent
CHECKOUT = PACKAGE.parents[1]  # the root of a checkout; nothing of ours in an installation
RECORDED_COMMIT = PACKAGE / "data" / "commit"
IMPORTED = {"halfbyte": "halfbyte", "vllm": "vllm", "flashinfer": "flashinfer-python"}  # module -> distribution


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of this copy, with + if files differ from it; None where nobody knows.

    An environment may lie inside the repository of something else, so git is asked in a checkout of ours alone."""
    try:
        return RECORDED_COMMIT.read_text(encoding="utf-8").strip() or None
    except OSError:
        return commit_of(CHECKOUT) if (CHECKOUT / ".git").exists() else None


def commit_of(root: Path) -> str | None:
    """Of the repository that a folder is in."""
    try:
        sha = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=5, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return sha + ("+" if dirty else "")


def place(path: Path) -> str:
    """Where a file lies, as far as another reader can use it."""
    path = path.resolve()
    roots = {"<checkout>": CHECKOUT, "<environment>": Path(sys.prefix), "~": Path.home()}
    for name, root in roots.items():
        if path.is_relative_to(root.resolve()):
            return f"{name}/{path.relative_to(root.resolve()).as_posix()}"
    return f"…/{'/'.join(path.parts[-2:])}"


def imports() -> dict[str, Any]:
    """Which copy of halfbyte and of the engines an import takes, and which other copies it hides."""
    found: dict[str, Any] = {}
    for module, distribution in IMPORTED.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        taken = Path(spec.origin).resolve().parent
        others = sorted({str(c) for c in copies(module, distribution)} - {str(taken)})
        found[module] = {
            "path": place(taken),
            "version": version(distribution),
            "commit": commit() if taken == PACKAGE.resolve() else commit_of(taken),
            "shadows": [place(Path(other)) for other in others],
        }
    return found


def copies(module: str, distribution: str) -> Iterator[Path]:
    """Every folder of that module that an import could take: on the path, or named by an editable installation."""
    for entry in sys.path:
        folder = Path(entry or ".") / module
        if (folder / "__init__.py").is_file():
            yield folder.resolve()
    for d in importlib.metadata.distributions(name=distribution):
        told = d.read_text("direct_url.json")
        url = json.loads(told) if told else {}
        if url.get("dir_info", {}).get("editable") and str(url.get("url", "")).startswith("file://"):
            root = Path(url["url"].removeprefix("file://"))
            yield from (f.resolve() for f in (root / module, root / "src" / module) if (f / "__init__.py").is_file())


def container() -> dict[str, str | None] | None:
    """Which kind, and its image where the container says it; None outside of one."""
    told = Path("/run/.containerenv")
    if told.is_file():
        named = re.search(r'^image="?([^"\n]+)', told.read_text(encoding="utf-8"), re.MULTILINE)
        return {"kind": "podman", "image": named[1] if named else None}
    label = Path("/etc/halfbyte-image")  # deploy's images write their own name there: Docker tells none
    image = label.read_text(encoding="utf-8").strip() if label.is_file() else None
    if Path("/.dockerenv").exists():
        return {"kind": "docker", "image": image}
    if "KUBERNETES_SERVICE_HOST" in child_environment():
        return {"kind": "kubernetes", "image": image}
    return None
