"""Numerics of the Triton phases in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels/triton`.

The interpreter must be chosen before Triton is imported, and it then holds for the whole process, so these files are
collected only where it was; `tests/kernels/test_interpreted.py` runs them in a process of their own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent))  # triton_cases
