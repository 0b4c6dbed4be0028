"""Runs against a baseline: read, paired, aligned by tokens, and told apart. No torch here.

runs       a run folder, read
pairing    which runs may be compared step by step, and why others may not
gap        the relative gap with its band
match      smoothing, and how many more tokens the worse run needs
result     all of it for one baseline and several runs: what `compare.json` holds
pictures, report, output, dashboard   how it is shown
live       the same gap while a run is still going
"""
