"""Checkpoints: the files of one (`files`), the state that it holds (`state`, `moments`, `random_state`), and how it is
written while training goes on (`writer`).
"""
