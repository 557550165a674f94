"""`python -m halfbyte.kernels.cpu`: build this machine's library ahead of its first use; `--list`: list its sets.

If the library cannot be built, the command says so and succeeds: the reference runs instead.
"""

from __future__ import annotations

import argparse
import sys

from halfbyte.kernels.cpu.build import Unavailable
from halfbyte.kernels.cpu.library import open_library, usable_sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="the instruction sets that this machine has, best first")
    if parser.parse_args().list:
        print(*(instructions.name for instructions in usable_sets()))
        return
    try:
        print(f"CPU kernels: {open_library('auto').path}")
    except Unavailable as e:
        print(f"no CPU kernels: {e}; the reference will run instead, far slower.", file=sys.stderr)


if __name__ == "__main__":
    main()
