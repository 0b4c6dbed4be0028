"""`python -m nvfp4_train.prepare [overrides]`: turns the text of `data.path` into tokens, as a training run would."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nvfp4_train import cli
from nvfp4_train.config import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_prepare, "prepare", argv)


def _prepare(config: RunConfig) -> None:
    from data.prepare import prepare

    corpus = prepare(config.data, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(corpus.path)
    for name, split in (("train", corpus.train), ("validation", corpus.validation)):
        print(f"  {name:<11}{split.documents:>12,} documents{split.tokens:>16,} tokens{split.bytes:>16,} bytes of text")
    print(f"  skipped    {corpus.empty:>12,} empty and {len(corpus.bad):,} unreadable documents")
    print(f"Train on it with data.path={corpus.path}, or with the same data.* settings.")


if __name__ == "__main__":
    sys.exit(main())
