"""Phases in Triton: every operation, every regime, every architecture from SM90 up.

Each phase file holds what the phase refuses and how it launches; the device code is in `jit/` and is imported when a
phase is bound, so that explaining a plan needs no Triton. A kernel is described once, as a `Call` (see `call.py`): the
launch runs it and `kernels/prove.py` compiles the same description for any architecture.

Activations between phases (names as in `halfbyte.ops`):

    x                    float32, as in the reference
    h, attn              rounded to bf16 where the next projection rounds there anyway, else float32 (see `stored`)
    q, k, v              float32 views of one [R, qkv] buffer until rope; q is bf16 after it
    topk_ids             int32; topk_weights float32
    logits               float32

Inputs are read in whatever float type they come in, so these phases stand next to others. Nothing here synchronises
with the host or reads device memory on it: grids come from `step.rows`, `step.sequences` and `step.max_kv_len`.
"""
