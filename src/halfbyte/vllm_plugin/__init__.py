"""halfbyte inside vLLM: its config, its layers and its custom operations, with our kernels behind them.

`launch` needs no vLLM: it says how vLLM is started for our gates. The `compat` files alone import vLLM.
"""
