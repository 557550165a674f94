"""halfbyte inside vLLM: a quantisation config, layers and custom operations that run our kernels.

`launch` builds vLLM's command line from our gates and needs no vLLM. Only the `compat` files import vLLM.
"""
