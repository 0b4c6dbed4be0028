"""Triton kernels. Each equals the PyTorch reference bit for bit; `quantize.py` is the definition, these are the speed."""
