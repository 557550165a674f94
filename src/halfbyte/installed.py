"""Installed packages: their versions, which copy an import loads, which copies it shadows, and halfbyte's own commit.

A wheel's build records its commit (`setup.py`); a checkout asks git. Paths are reported relative to the checkout, the
environment or the home folder, not as paths of this machine. The packages themselves are not imported.
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
    """The commit of this copy, with + if files differ from it; None if it is unknown.

    An environment may lie inside another project's repository, so git is only asked in a checkout of halfbyte."""
    try:
        return RECORDED_COMMIT.read_text(encoding="utf-8").strip() or None
    except OSError:
        return commit_of(CHECKOUT) if (CHECKOUT / ".git").exists() else None


def commit_of(root: Path) -> str | None:
    """The commit of the repository that contains a folder, with + if files differ from it."""
    try:
        sha = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return sha + ("+" if dirty else "")


def portable_path(path: Path) -> str:
    """A path relative to the checkout, the environment or the home folder."""
    path = path.resolve()
    roots = {"<checkout>": CHECKOUT, "<environment>": Path(sys.prefix), "~": Path.home()}
    for name, root in roots.items():
        if path.is_relative_to(root.resolve()):
            return f"{name}/{path.relative_to(root.resolve()).as_posix()}"
    return f"…/{'/'.join(path.parts[-2:])}"


def imports() -> dict[str, Any]:
    """The copy of halfbyte and of each engine that an import loads, and the copies that it shadows."""
    packages: dict[str, Any] = {}
    for module, distribution in IMPORTED.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        package = Path(spec.origin).resolve().parent
        others = sorted({str(c) for c in copies(module, distribution)} - {str(package)})
        packages[module] = {
            "path": portable_path(package),
            "version": version(distribution),
            "commit": commit() if package == PACKAGE.resolve() else commit_of(package),
            "shadows": [portable_path(Path(other)) for other in others],
        }
    return packages


def copies(module: str, distribution: str) -> Iterator[Path]:
    """Every folder from which the module could be imported: on the path, or of an editable installation."""
    for entry in sys.path:
        folder = Path(entry or ".") / module
        if (folder / "__init__.py").is_file():
            yield folder.resolve()
    for d in importlib.metadata.distributions(name=distribution):
        text = d.read_text("direct_url.json")
        url = json.loads(text) if text else {}
        if url.get("dir_info", {}).get("editable") and str(url.get("url", "")).startswith("file://"):
            root = Path(url["url"].removeprefix("file://"))
            yield from (f.resolve() for f in (root / module, root / "src" / module) if (f / "__init__.py").is_file())


def container() -> dict[str, str | None] | None:
    """The container's kind, and its image if the container records it; None outside a container."""
    podman = Path("/run/.containerenv")
    if podman.is_file():
        match = re.search(r'^image="?([^"\n]+)', podman.read_text(encoding="utf-8"), re.MULTILINE)
        return {"kind": "podman", "image": match[1] if match else None}
    label = Path("/etc/halfbyte-image")  # our images write their name there, because Docker does not reveal it
    image = label.read_text(encoding="utf-8").strip() if label.is_file() else None
    if Path("/.dockerenv").exists():
        return {"kind": "docker", "image": image}
    if "KUBERNETES_SERVICE_HOST" in child_environment():
        return {"kind": "kubernetes", "image": image}
    return None
