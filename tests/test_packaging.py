"""An installation carries what a checkout has: the embedded model and the kernels' sources."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_every_model_is_a_data_file() -> None:
    files = SETUP["data-files"]
    for folder in (ROOT / "models").iterdir():
        assert files[f"share/halfbyte/models/{folder.name}"] == [f"models/{folder.name}/*"]


def test_every_file_that_is_not_python_is_package_data() -> None:
    package = ROOT / "src" / "halfbyte"
    listed = {f for pattern in SETUP["package-data"]["halfbyte"] for f in package.glob(pattern)}
    others = {f for f in package.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert others <= listed, sorted(map(str, others - listed))
