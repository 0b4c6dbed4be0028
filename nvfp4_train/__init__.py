"""nvfp4_train: pretraining of hybrid Mamba-Transformer language models in 4-bit NVFP4."""

__version__ = "0.1.0"
