"""The list of kernel phases. Importing a phase needs neither Triton nor CUDA: those are imported when it is bound."""

from __future__ import annotations

from halfbyte.kernels.borrowed.flashinfer_attention import PHASES as FLASHINFER_ATTENTION
from halfbyte.kernels.borrowed.flashinfer_moe import PHASES as FLASHINFER_MOE
from halfbyte.kernels.borrowed.vllm import PHASES as MARLIN
from halfbyte.kernels.cpu.phase import PHASES as CPU
from halfbyte.kernels.cuda.attention.flash import PHASES as FLASH
from halfbyte.kernels.cuda.attention.flash_sync import PHASES as FLASH_SYNC
from halfbyte.kernels.cuda.batch.fused_phase import PHASES as BATCH_FUSED
from halfbyte.kernels.cuda.batch.phase import PHASES as BATCH
from halfbyte.kernels.cuda.decode.phase import PHASES as DECODE
from halfbyte.kernels.cuda.embedding.phase import PHASES as EMBEDDING
from halfbyte.kernels.cuda.prefill.fp8 import PHASES as GROUPED_FP8
from halfbyte.kernels.cuda.prefill.layer import PHASES as PREFILL
from halfbyte.kernels.cuda.prefill.mx import PHASES as GROUPED_MX
from halfbyte.kernels.cuda.prefill.phases import PHASES as GROUPED
from halfbyte.kernels.cuda.prefill.sync import PHASES as GROUPED_SYNC
from halfbyte.kernels.hybrid.moe import PHASES as HYBRID
from halfbyte.kernels.triton.phases import PHASES as TRITON
from halfbyte.plan.phase import Phase

PHASES: tuple[Phase, ...] = (
    *DECODE,
    *EMBEDDING,
    *BATCH,
    *BATCH_FUSED,
    *PREFILL,
    *GROUPED,
    *GROUPED_FP8,
    *GROUPED_SYNC,
    *GROUPED_MX,
    *FLASH,
    *FLASH_SYNC,
    *TRITON,
    *HYBRID,
    *CPU,
    *MARLIN,
    *FLASHINFER_MOE,
    *FLASHINFER_ATTENTION,
)
