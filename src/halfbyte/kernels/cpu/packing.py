"""Packs weights from files into the layout rows16 with the CPU kernels' library, in one pass of parallel reads.

The result has the bits of `formats.rows16.pack`; each thread also holds half a megabyte of the file. Nothing here reads
a header. A file that cannot be read is an error, never a crash.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import cast

import torch
from torch import Tensor

from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.formats.blocks import no_scales
from halfbyte.formats.rows16 import ROWS, tile_bytes
from halfbyte.formats.stored import Packer, Stored
from halfbyte.formats.tensor import GEOMETRY, FormatName
from halfbyte.kernels.cpu import library as native

READERS = 4  # at least: a disk answers several faster than one, and eight were no faster (docs/LOG.md)
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def packer_of(library: native.Library, threads: int) -> Packer:
    readers = max(READERS, threads)

    def pack(stored: Stored) -> tuple[MXTensor | DenseTiles, bool]:
        *lead, n, k = stored.shape
        out = torch.empty((*lead, -(-n // ROWS), tile_bytes(stored.format, k)), dtype=torch.uint8)
        sound = _run(library, stored, readers, out)
        if stored.format not in GEOMETRY:
            return DenseTiles(out, stored.shape, DTYPES[stored.format], "rows16"), sound
        form = cast(FormatName, stored.format)
        return MXTensor(out, no_scales(out), stored.shape, form, "rows16"), sound

    def widen(stored: Stored) -> tuple[Tensor, bool]:
        assert stored.gguf
        out = torch.empty(stored.shape, dtype=torch.float32)
        return out, _run(library, stored, readers, out)

    return Packer("rows16", pack, widen, lambda stored: _run(library, stored, readers, None))


def _run(library: native.Library, stored: Stored, threads: int, out: Tensor | None) -> bool:
    *lead, rows, cols = stored.shape
    parts = (native.StoredRowsStruct * len(stored.parts))(
        *(
            native.StoredRowsStruct(p.file, p.scale_file, p.offset, p.scale_offset, p.rows, p.first, p.step)
            for p in stored.parts
        )
    )
    packing = native.PackingStruct(
        native.FORMATS[stored.format],
        int(stored.gguf),
        int(out is not None and out.dtype == torch.float32),
        threads,
        math.prod(lead),
        rows,
        cols,
        len(parts),
        parts,
        None if out is None else out.data_ptr(),
    )
    sound = ctypes.c_int32()
    failure = library.calls.hb_pack(ctypes.byref(packing), ctypes.byref(sound))
    if failure > 0:
        raise OSError(failure, os.strerror(failure))
    if failure < 0:
        raise EOFError
    return bool(sound.value)
