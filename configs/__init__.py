"""Values of every run: Hydra groups in plain YAML. The schema that checks them is `nvfp4_train/config.py`."""
