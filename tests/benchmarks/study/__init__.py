"""The study: recipes and variants of recipes at nano size, paired by seed, beside what was published.

    python -m tests.benchmarks.study --help

`cells` says what is trained, `runner` trains it, `store` keeps it, `numbers` and `claims` read it, `page` writes it.
"""
