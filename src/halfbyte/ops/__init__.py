"""What each operation of the network means: plain torch, one file per operation. This is the specification.

Every function here is **bitwise independent of batch composition**: a row's result is the same alone and among any
others (see `products.py`). Speed is not a goal; kernels have that.

Names used everywhere (R rows of the step, S sequences):

    x        [R, hidden]              residual stream
    h        [R, hidden]              normalised input of a projection
    q, k, v  [R, heads|kv_heads, D]
    attn     [R, heads * D]
    topk_ids, topk_weights  [R, top_k]
    logits   [L, vocab]               rows asked for, only
"""
