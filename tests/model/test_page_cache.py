"""What loading and verifying leave in the page cache: everything, or next to nothing, as they are asked."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halfbyte.model import checkpoint, checksums, load, synthetic
from halfbyte.model.config import ModelConfig

# 20 MB: the page at each end of a tensor stays, so tensors must be large beside a page.
CONFIG = ModelConfig(
    layers=2, hidden=512, intermediate=512, experts=16, top_k=4, heads=8, kv_heads=2, head_dim=64, vocab=4096,
    eos_tokens=(1,), pad_token=2,
)  # fmt: skip


def cached(path: Path) -> float:
    """Share of a file's pages that are in memory."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    pages: list[int] = []
    for file in files:
        with file.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            found = np.zeros(-(-len(view) // mmap.PAGESIZE), dtype=np.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
            assert libc.mincore(view.ctypes.data, len(view), found.ctypes.data) == 0, os.strerror(ctypes.get_errno())
            del view
        pages += (found & 1).tolist()
    return sum(pages) / len(pages)


def uncache(path: Path) -> None:
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if cached(path) > 0.05:
        pytest.skip("this file system keeps its files in memory")


@pytest.fixture(scope="module", params=["folder", "file.gguf"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / request.param
    (synthetic.write_gguf if path.suffix else synthetic.write_safetensors)(CONFIG, 3, path)
    return path


def plain(path: Path, keep: bool) -> None:
    checkpoint.load(path, keep_cached=keep)


def into_place(path: Path, keep: bool) -> None:
    """As an engine on a CPU loads, with the kernels' packer where they are built."""
    load.load_model(load.resolve_model(str(path)), keep_cached=keep)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no such hints")
@pytest.mark.parametrize("read", [plain, into_place])
def test_loading_leaves_the_page_cache_as_it_was(model: Path, read: Callable[[Path, bool], None]) -> None:
    uncache(model)
    read(model, True)
    assert cached(model) > 0.9  # what the next start is quick by
    read(model, False)
    assert cached(model) < 0.15


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no such hints")
def test_verifying_does_so_too(model: Path) -> None:
    file = next(iter(sorted(model.glob("*.safetensors")))) if model.is_dir() else model
    uncache(file)
    digest = checksums.sha256_of(file)
    assert cached(file) > 0.9
    assert checksums.sha256_of(file, keep_cached=False) == digest
    assert cached(file) < 0.15
