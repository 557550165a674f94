"""halfbyte: gpt-oss from MXFP4 weights at the speed of the memory it lives in."""

__version__ = "0.1.0"
