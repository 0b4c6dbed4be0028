"""Triton kernels, equal to the PyTorch reference bit for bit: `quantizer.py` is the definition, these are the speed."""
