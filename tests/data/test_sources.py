"""What counts as a source, in which order its files are read, and what is refused."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from data.config import DataError
from data.readers import BadDocument, read_documents
from data.sources import check_unchanged, find_source


def test_builtin_is_the_standard_library_without_tests() -> None:
    source = find_source("builtin")
    names = [file.name for file in source.files]
    assert source.root == Path(sysconfig.get_path("stdlib"))
    assert {"os.py", "json/decoder.py", "unittest/mock.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages"} & set(n.split("/")[:-1])]
    assert names == sorted(names)
    assert 5e6 < source.size < 30e6
    assert find_source("builtin").identity == source.identity


def test_packages_are_the_text_of_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", {"purelib": str(tmp_path)}.__getitem__)
    with pytest.raises(DataError, match=f"no package in {tmp_path} has source text"):
        find_source("packages")
    contents = {
        "b/latin.py": b"# coding: latin-1\nname = '\xe9'\n",
        "a/kernel.cuh": b"// text\n",
        "a-1.0.dist-info/LICENSE.txt": b"licence\n",
        "a/picture.png": b"no text",
        "a/__pycache__/x.py": b"no source",
        "a/table.py": b"x = 1\n" * (1 << 18),
        "b/latin.h": b"\xe9 states no encoding\n",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = find_source("packages")
    names = [file.name for file in source.files]
    assert names == ["a-1.0.dist-info/LICENSE.txt", "a/kernel.cuh", "b/latin.h", "b/latin.py"]
    assert (source.kind, source.ignored, source.root) == ("packages", 2, tmp_path)
    documents = list(read_documents(source, "text"))
    assert [getattr(one, "text", None) for one in documents] == [
        "licence\n",
        "// text\n",
        None,
        "# coding: latin-1\nname = 'é'\n",
    ]
    assert isinstance(documents[2], BadDocument)


def test_folder_is_read_by_name_and_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "sub/a.md", "a.txt", ".hidden.txt", ".git/c.txt", "picture.png"):
        (tmp_path / name).write_text("text")
    source = find_source(str(tmp_path))
    assert [file.name for file in source.files] == ["a.txt", "b.txt", "sub/a.md"]
    assert (source.kind, source.ignored, source.size) == ("text", 1, 12)


def test_data_files_win_over_text_beside_them(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a.jsonl").write_text("{}")
    source = find_source(str(tmp_path))
    assert (source.kind, [file.name for file in source.files], source.ignored) == ("jsonl", ["a.jsonl"], 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "jsonl"),
        ("a.jsonl.gz", "jsonl"),
        ("b.ndjson.ZST", "jsonl"),
        ("a.NDJSON", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.log", "text"),
        ("a", "text"),
    ],
)
def test_kind_of_a_single_file(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("x")
    assert find_source(str(tmp_path / name)).kind == kind


def test_identity_changes_with_size_time_and_place(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, ns=(1, 1))
    first = find_source(str(file)).identity
    os.utime(file, ns=(1, 2))
    second = find_source(str(file)).identity
    file.write_text("four")
    os.utime(file, ns=(1, 1))
    third = find_source(str(file)).identity
    assert len({first, second, third}) == 3
    file.write_text("one")
    os.utime(file, ns=(1, 1))
    assert find_source(str(file)).identity == first


def test_a_file_changed_while_read_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    source = find_source(str(file))
    check_unchanged(source.files)
    file.write_text("four")
    with pytest.raises(DataError, match=r"a\.txt was changed while it was being read"):
        check_unchanged(source.files)
    file.unlink()
    with pytest.raises(DataError, match=r"a\.txt is gone since it was listed"):
        source.files[0].sha256()


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"there is no {tmp_path}/nothing\. Write the path"):
        find_source(str(tmp_path / "nothing"))


def test_empty_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"{tmp_path}/a\.txt is empty \(0 bytes\)"):
        find_source(str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match=rf"all 2 files in {tmp_path} are empty"):
        find_source(str(tmp_path))


def test_folder_without_usable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no file to read: wanted .*found no files"):
        find_source(str(tmp_path))
    (tmp_path / "a.txt.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"wanted \.parquet \.jsonl .*found 1 of \.gz\. Of compressed files"):
        find_source(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt.zst", r"is compressed.*name it \.jsonl\.zst"),
        ("a.zip", r"is compressed\. Decompress it first; \.jsonl\.gz"),
        ("a.json", "convert it .*jq -c"),
        ("a.bin", r"has no \.idx"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_text("[]")
    with pytest.raises(DataError, match=words):
        find_source(str(tmp_path / name))


def test_two_kinds_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(DataError, match=r"1 Parquet and 1 JSON lines files\. A source is of one kind"):
        find_source(str(tmp_path))


def test_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_source(str(tmp_path / "pipe"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"link\.txt is a link to .*/gone, which is not there"):
        find_source(str(tmp_path / "folder"))
    (tmp_path / "folder" / "link.txt").unlink()
    os.mkfifo(tmp_path / "folder" / "pipe.txt")
    with pytest.raises(DataError, match=r"folder/pipe\.txt is no regular file"):
        find_source(str(tmp_path / "folder"))
