"""`python -m nvfp4_train.prepare [overrides]`: turns the text of `data.path` or `data.sources` into tokens, as a run
would; with `tokenizer.train=FILE` it trains the tokenizer for that first, with `shard=i/n` it does a part of the work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

from data.corpus import Corpus
from nvfp4_train import cli
from nvfp4_train.config import ConfigError, RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_prepare, "prepare", argv)


def _prepare(config: RunConfig) -> None:
    from data.prepare import Shard, prepare, prepare_shard

    data, sources = config.data, config.data.blended()
    if config.tokenizer.train is not None:
        from data.training import train_tokenizer

        if config.shard is not None:
            raise ConfigError("tokenizer.train and shard: train the tokenizer first, then let the shards use it.")
        data = replace(data, tokenizer=str(train_tokenizer(data, config.tokenizer, _say)))
    shard = None if config.shard is None else Shard.parse(config.shard)
    try:
        for source in sources:
            settings = data.of_source(source)
            corpus = prepare(settings, say=_say) if shard is None else prepare_shard(settings, shard, say=_say)
            if corpus is not None:
                _print(corpus)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("interrupted; what is whole is kept: the same command goes on from there") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(corpus: Corpus) -> None:
    print(corpus.path)
    for name, split in (("train", corpus.train), ("validation", corpus.validation)):
        print(f"  {name:<11}{split.documents:>12,} documents{split.tokens:>16,} tokens{split.bytes:>16,} bytes of text")
    print(f"  skipped    {corpus.empty:>12,} empty and {len(corpus.bad):,} unreadable documents")
    print(f"Train on it with {quote(f'data.path={corpus.path}')}, or with the same data.* settings.")


if __name__ == "__main__":
    sys.exit(main())
