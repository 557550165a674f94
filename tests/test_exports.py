"""What `import halfbyte` promises."""

from __future__ import annotations

import subprocess
import sys

import halfbyte

EXPORTS = [
    "Answer",
    "Completion",
    "Constraint",
    "Delta",
    "Engine",
    "Gates",
    "HalfbyteError",
    "Piece",
    "SamplingParams",
    "ToolCall",
    "__version__",
]


def test_export_list_is_stable() -> None:
    assert halfbyte.__all__ == EXPORTS
    for name in EXPORTS:
        assert getattr(halfbyte, name) is not None


def test_dir_shows_the_exports_without_importing_them() -> None:
    code = "import sys, halfbyte; print(sorted(set(halfbyte.__all__) - set(dir(halfbyte))), 'torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[] False\n"
    )


def test_import_is_light() -> None:
    code = "import sys, halfbyte; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
