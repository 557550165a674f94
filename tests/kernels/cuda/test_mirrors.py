"""Structs that kernels take by value, and shared memory that Python counts, against what the compiler makes of them.

The emulator's builds say name, offset and size of every field (HB_MIRRORED in emulator.h); two fields of one size that
change places keep the struct's size, and are seen here all the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest

from halfbyte.kernels.cuda.attention import batch as batch_attention
from halfbyte.kernels.cuda.attention import flash, flash_sync, prompt
from halfbyte.kernels.cuda.batch import builds as batch
from halfbyte.kernels.cuda.decode import shape as decode
from halfbyte.kernels.cuda.prefill import builds as prefill
from halfbyte.kernels.cuda.sampling import sampler
from halfbyte.kernels.launch import Program
from tests.kernels.cuda.decode.decode_models import small
from tests.kernels.cuda.emulator import mirror_fields, sizes, struct_fields

STEP = decode.StepShape(128, 128, 2, 32, 8, 1, 256, ring=12, slot=8_704)
LENT = replace(small(4), lent=True)  # as test_lent.py runs it
BATCH_ROWS = batch.RowShape(2880, 128, 4)
PREFILL_ROWS = prefill.rows_build("pack_rows").program
SAMPLER = sampler.BUILDS["sample_race"].program


@dataclass(frozen=True)
class Mirror:
    program: Program
    struct: str  # in the source
    mirror: type[ctypes.Structure]


MIRRORS = (
    Mirror(STEP.program(), "Step", decode.StepArgs),
    Mirror(STEP.program(), "Layer", decode.LayerArgs),
    Mirror(LENT.program(), "Layer", decode.LentLayerArgs),
    Mirror(batch.ProductShape("q8", 1088).program(), "Product", batch.BatchProductArgs),
    Mirror(batch.ProductShape("q8", 1088).program(), "Stage", batch.StageArgs),
    Mirror(BATCH_ROWS.program("rows"), "Rows", batch.BatchRowsArgs),
    Mirror(batch_attention.AttentionShape(8, 2).program(), "Attention", batch_attention.AttentionArgs),
    Mirror(flash.SLIDING.program(), "Flash", prompt.FlashArgs),
    Mirror(flash_sync.SINGLE.program(), "Flash", prompt.FlashArgs),
    Mirror(prefill.GroupedShape("q8", "m256n64", False).program(), "Product", prefill.GroupedProductArgs),
    Mirror(PREFILL_ROWS, "Rows", prefill.GroupedRowsArgs),
    Mirror(SAMPLER, "Sampling", sampler.SampleArgs),
)


@pytest.mark.parametrize("m", MIRRORS, ids=lambda m: f"{m.program.source.parent.name}-{m.struct}")
def test_every_field_lies_where_its_mirror_has_it(m: Mirror) -> None:
    assert struct_fields(m.program, m.struct) == mirror_fields(m.mirror)


def test_two_fields_that_changed_places_are_seen() -> None:
    """The struct's size would not show it."""

    first, second, *rest = sampler.SampleArgs._fields_

    class Swapped(ctypes.Structure):
        _fields_ = [(name, kind) for name, kind, *_ in (second, first, *rest)]

    assert ctypes.sizeof(Swapped) == sizes(SAMPLER, 1)[0]
    assert struct_fields(SAMPLER, "Sampling") != mirror_fields(Swapped)


def test_shared_memory_of_the_decode_step_is_an_upper_bound() -> None:
    """`StepShape.shared_bytes` may count up to 512 bytes too many (alignment), never one too few."""
    for step in (STEP, LENT):
        shared = sizes(step.program(), 2)[1]
        assert step.shared_bytes - 512 < shared <= step.shared_bytes


def test_shared_memory_of_row_kernels() -> None:
    finish, choose = sizes(BATCH_ROWS.program("rows"), 6)[4:]
    assert finish == batch.ROW_SHARED["batch_finish"]
    assert choose <= batch.ROW_SHARED["batch_choose"]  # which holds any number of experts
    assert sizes(PREFILL_ROWS, 2)[1] == prefill.ROW_SHARED


def test_shared_memory_of_the_sampler() -> None:
    _, cutoffs, race = sizes(SAMPLER, 3)
    assert cutoffs == sampler.SHARED["sample_cutoffs"]
    assert race <= min(sampler.SHARED["sample_argmax"], sampler.SHARED["sample_race"])


def test_shared_memory_of_batch_attention() -> None:
    assert sizes(batch_attention.AttentionShape(8, 2).program(), 2)[1] == batch_attention.SHARED
