"""Launchers. They call the command line and nothing else."""
