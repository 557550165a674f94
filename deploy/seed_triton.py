"""Compile ahead the module by which Triton launches kernels, the one thing that it needs a C compiler for at run time.

    TRITON_CACHE_DIR=/seed/triton TRITON_LIBCUDA_PATH=/opt/libcuda python seed_triton.py FOLDER_WITH_A_STUB_OF_LIBCUDA

Runs where an image is built, without a GPU: the driver's stub stands in for the driver. The cache's key is made from
the sources, the platform and the folder that the driver was linked from, so TRITON_LIBCUDA_PATH must be the same when
the module is looked for; the folder need not be there then. Does nothing, and says so, where there is no Triton.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
from pathlib import Path


def main(stubs: Path) -> int:
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    cache.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("triton") is None:
        print("there is no Triton here, so there is nothing to compile")
        return 0
    folder = Path(os.environ["TRITON_LIBCUDA_PATH"])
    folder.mkdir(parents=True)
    try:
        stub = folder / "libcuda.so.1"
        stub.symlink_to(stubs.absolute() / "libcuda.so")
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)  # found by its name when the module is loaded
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
    finally:
        shutil.rmtree(folder)
    made = sorted(cache.rglob("*.so"))
    print("\n".join(str(path) for path in made))
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
