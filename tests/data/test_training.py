"""A tokenizer of one's own: the size that was asked for, from text that is not held out, never over another file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from data.config import DataConfig, DataError, TokenizerTraining
from data.prepare import prepare
from data.splitting import position
from data.tokenizers import load_tokenizer
from data.training import train_tokenizer
from nvfp4_train.prepare import main
from tests.data.conftest import MakeConfig, numbered, write_jsonl


@pytest.fixture
def config(tmp_path: Path, make_config: MakeConfig) -> DataConfig:
    return make_config(write_jsonl(tmp_path / "a.jsonl", numbered(60)))


def silent(line: str) -> None:
    """For tests that do not look at the lines."""


def test_it_has_the_size_and_the_tokens_that_were_asked_for(config: DataConfig, tmp_path: Path) -> None:
    training = TokenizerTraining(str(tmp_path / "sub" / "t.json"), 290, ("<|begin|>", "<|endoftext|>"))
    path = train_tokenizer(config, training, silent)
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (290, 1)
    text = "the quick ünknown \N{GRINNING FACE}\n\tbrown"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the quick brown").size < 10
    again = train_tokenizer(config, dataclasses.replace(training, train=str(tmp_path / "again.json")), silent)
    assert again.read_bytes() == path.read_bytes()
    corpus = prepare(dataclasses.replace(config, tokenizer=str(path)), say=silent)
    assert corpus.tokenizer_hash == tokenizer.hash


def test_it_learns_from_what_is_trained_on_alone(tmp_path: Path, make_config: MakeConfig) -> None:
    texts = numbered(200, 30)
    held_out = [text for text in texts if position(text.encode()) < 0.5]
    marked = [f"{text} zyzzyva" for text in texts]
    kept = [text for text in marked if position(text.encode()) >= 0.5]
    assert held_out
    source = write_jsonl(tmp_path / "a.jsonl", [*kept, *(t.replace("zyzzyva", "qwerty") for t in marked)])
    config = make_config(source, validation_share=0.5)
    train_tokenizer(config, TokenizerTraining(str(tmp_path / "t.json"), 330), silent)
    merged = Tokenizer.from_file(str(tmp_path / "t.json")).get_vocab()
    assert any("zyzz" in token for token in merged)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 100}, r"vocab_size=100 is below 257: 256 bytes and 1 special"),
        ({"vocab_size": 100_000}, r"the text has merges for \d+ ids alone"),
        ({"special_tokens": ("<x>",)}, "has none that ends a document"),
        ({"special_tokens": ("</s>", "<x>", "</s>")}, "names one twice, or nothing"),
        ({"special_tokens": ("</s>", "")}, "names one twice, or nothing"),
    ],
)
def test_settings_that_make_no_tokenizer(config: DataConfig, tmp_path: Path, changes: dict, words: str) -> None:
    training = dataclasses.replace(TokenizerTraining(str(tmp_path / "t.json"), 270), **changes)
    with pytest.raises(DataError, match=words):
        train_tokenizer(config, training, silent)
    assert not (tmp_path / "t.json").exists()


def test_no_file_is_overwritten_and_two_tokenizers_are_none(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("mine")
    with pytest.raises(DataError, match=r"t\.json is there already and is not overwritten"):
        train_tokenizer(config, TokenizerTraining(str(tmp_path / "t.json"), 270), silent)
    other = dataclasses.replace(config, tokenizer="/other.json")
    with pytest.raises(DataError, match=r"data\.tokenizer=/other\.json are two tokenizers"):
        train_tokenizer(other, TokenizerTraining(str(tmp_path / "u.json"), 270), silent)
    assert (tmp_path / "t.json").read_text() == "mine"


def test_a_tokenizer_that_is_to_be_used_is_trained_once(config: DataConfig, tmp_path: Path) -> None:
    said: list[str] = []
    training = TokenizerTraining(str(tmp_path / "t.json"), 280)
    named = dataclasses.replace(config, tokenizer=str(tmp_path / "t.json"))
    written = train_tokenizer(named, training, said.append).read_bytes()
    assert train_tokenizer(named, training, said.append).read_bytes() == written
    assert said[-1] == f"tokenizer: {tmp_path / 't.json'} is there already"
    with pytest.raises(DataError, match=r"has 280 ids, not 290\. Write tokenizer\.vocab_size=280 to use it"):
        train_tokenizer(named, dataclasses.replace(training, vocab_size=290), said.append)
    assert load_tokenizer(named.tokenizer).vocab_size == 280


def test_the_command_trains_and_prepares(
    config: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [f"data.path={config.path}", f"data.prepared={tmp_path / 'p'}"]
    assert main([*where, f"tokenizer.train={tmp_path / 't.json'}", "tokenizer.vocab_size=280"]) == 0
    done = capsys.readouterr()
    assert f"tokenizer: wrote {tmp_path / 't.json'}; the model needs model.vocab_size=280 or more" in done.err
    folder = Path(done.out.splitlines()[0])
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    assert main([*where, "shard=1/2"]) == 0
    assert "shard 1/2 is done" not in capsys.readouterr().err  # one part, and this shard has it
    assert main([*where, "shard=3/2"]) == 2
    assert "shard=3/2: wanted i/n" in capsys.readouterr().err


def test_a_preparation_that_is_interrupted_says_what_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data.prepare.prepare", interrupt)
    assert main([f"data.path={tmp_path}"]) == 75
    assert capsys.readouterr().err == "interrupted; what is whole is kept: the same command goes on from there\n"


def test_sentencepiece(tmp_path: Path, make_config: MakeConfig) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text("\n".join(numbered(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=80,
        minloglevel=2,
        hard_vocab_limit=False,
        byte_fallback=False,
    )
    name = str(tmp_path / "sp.model")
    tokenizer = load_tokenizer(name)
    text = "the quick brown fox"
    ids = tokenizer.encode(text)
    library = sentencepiece.SentencePieceProcessor(model_file=name)
    assert ids.tolist() == library.encode(text)
    assert tokenizer.eod == library.eos_id() == 2
    assert tokenizer.vocab_size == library.vocab_size()
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod]) == text
    assert tokenizer.eod not in tokenizer.encode("a</s>b")  # text can't forge the end
    source = write_jsonl(tmp_path / "a.jsonl", numbered(30))
    corpus = prepare(make_config(source, tokenizer=name), say=silent)
    assert (corpus.path / "tokenizer.model").read_bytes() == (tmp_path / "sp.model").read_bytes()
    with pytest.raises(DataError, match=rf"Set data\.tokenizer={corpus.path}/tokenizer\.model"):
        prepare(make_config(corpus.path), say=silent)
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"bad\.model is not a file of SentencePiece"):
        load_tokenizer(str(tmp_path / "bad.model"))
