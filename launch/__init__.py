"""Launchers: they start the command line, on this machine or on many."""
