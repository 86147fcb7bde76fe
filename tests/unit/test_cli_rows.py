"""Rows out of files of every format, and what makes one unusable."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from nobiru.cli.rows import BadRow, Row, RowSource, input_format
from nobiru.errors import ConfigError


def source(path: Path, *, text: str | None = None, ids: str | None = None, kind: str | None = None) -> RowSource:
    return RowSource(str(path), kind=input_format(str(path), kind), text_column=text, id_column=ids)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_formats_by_suffix_or_by_name() -> None:
    assert input_format("a/b.JSONL", None) == "jsonl"
    assert input_format("a.ndjson", None) == "jsonl"
    assert input_format("a.jsonl", "txt") == "txt"
    for path, given, words in [("a.doc", None, ".csv"), ("-", None, "--format"), ("a.txt", "xml", "parquet")]:
        with pytest.raises(ConfigError, match=words):
            input_format(path, given)


def test_txt_is_one_text_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbffirst\r\n\nthird, no end of line")
    rows = list(source(path))
    assert rows == [
        Row(index=0, text="first"),
        Row(index=1, text=""),
        Row(index=2, text="third, no end of line"),
    ]


def test_txt_with_bad_bytes(tmp_path: Path) -> None:
    rows = list(source(write(tmp_path / "a.txt", b"good\nb\xffad\ngood")))
    assert rows[1] == BadRow(index=1, place="line 2", reason="not valid UTF-8 at character 2 of the text")
    assert rows[2] == Row(index=2, text="good")


def test_jsonl_with_ids_and_bad_lines(tmp_path: Path) -> None:
    lines = [
        '{"id": 7, "text": "one"}',
        "",
        '{"id": "b", "text": "zwei", "more": [1]}',
        "{",
        "[1]",
        '{"id": 1}',
        '{"id": 1, "text": null}',
        '{"id": 1.5, "text": "x"}',
        '{"id": true, "text": "x"}',
        '{"id": 1, "text": "\\ud800"}',
        '{"id": 99999999999999999999, "text": "x"}',
        '{"id": 2, "text": "last"}',
    ]
    rows = list(source(write(tmp_path / "a.jsonl", "\n".join(lines)), ids="id"))
    assert [row for row in rows if isinstance(row, Row)] == [
        Row(index=0, text="one", row_id=7),
        Row(index=1, text="zwei", row_id="b"),
        Row(index=10, text="last", row_id=2),
    ]
    bad = {row.place: row.reason for row in rows if isinstance(row, BadRow)}
    assert list(bad) == [f"line {number}" for number in range(4, 12)]
    assert "not valid JSON" in bad["line 4"]
    assert "object" in bad["line 5"]
    assert "no field 'text'" in bad["line 6"]
    assert "None" in bad["line 7"]
    assert "1.5" in bad["line 8"]
    assert "True" in bad["line 9"]


def test_jsonl_of_bare_strings(tmp_path: Path) -> None:
    assert list(source(write(tmp_path / "a.jsonl", '"one"\n"two"\n'))) == [
        Row(index=0, text="one"),
        Row(index=1, text="two"),
    ]


def test_the_text_column_is_found(tmp_path: Path) -> None:
    only = write(tmp_path / "only.jsonl", '{"n": 1, "title": "t"}\n{"n": 2, "title": "u"}\n')
    assert [row.text for row in source(only) if isinstance(row, Row)] == ["t", "u"]
    beside_id = write(tmp_path / "id.jsonl", '{"id": "x", "body": "t"}\n')
    assert list(source(beside_id, ids="id")) == [Row(index=0, text="t", row_id="x")]
    two = write(tmp_path / "two.jsonl", '{"title": "t", "body": "b"}\n')
    with pytest.raises(ConfigError, match=r"--text-column.*title, body"):
        list(source(two))
    assert [row.text for row in source(two, text="body") if isinstance(row, Row)] == ["b"]


def test_csv(tmp_path: Path) -> None:
    content = 'id,text,n\r\n1,"two\nlines, ""quoted""",x\r\n2,plain,y\r\n\r\n3,short\r\n4,last,z\r\n'
    path = write(tmp_path / "a.csv", content)
    assert list(source(path, ids="id")) == [
        Row(index=0, text='two\nlines, "quoted"', row_id="1"),
        Row(index=1, text="plain", row_id="2"),
        BadRow(index=2, place="line 6", reason="2 fields, but the header has 3"),
        Row(index=3, text="last", row_id="4"),
    ]


def test_tsv_and_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "a\tb\nx, y\tz\n")
    assert list(source(path, text="a")) == [Row(index=0, text="x, y")]
    with pytest.raises(ConfigError, match="columns are a, b"):
        source(path, text="text").__iter__().__next__()
    with pytest.raises(ConfigError, match=r"--text-column.*a, b"):
        next(iter(source(path)))


def test_csv_with_a_long_field_and_an_unclosed_quote(tmp_path: Path) -> None:
    long = "word " * 60_000
    rows = list(source(write(tmp_path / "a.csv", f'text\n{long}\n"never closed\nmore')))
    assert rows[0] == Row(index=0, text=long)
    assert isinstance(rows[1], BadRow)
    assert rows[1].place == "line 3"


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": list(range(3000)), "body": [None if n == 1 else f"t{n}" for n in range(3000)]})
    parquet.write_table(table, path, row_group_size=500)
    from_file = source(path, ids="id")
    rows = list(from_file)
    assert rows[0] == Row(index=0, text="t0", row_id=0)
    assert rows[1] == BadRow(index=1, place="row 2", reason="body is None, expected a text")
    assert rows[-1] == Row(index=2999, text="t2999", row_id=2999)
    assert (from_file.position, from_file.size) == (3000, 3000)
    with pytest.raises(ConfigError, match="columns are id, body"):
        source(path, text="title")
    with pytest.raises(ConfigError):
        source(write(tmp_path / "no.parquet", "PAR1 no"))


def test_position_follows_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "äö\nb\n")
    rows = source(path)
    assert (rows.position, rows.size) == (0, 7)
    next(iter(rows))
    assert rows.position == 5
    list(rows)
    assert rows.position == 7


def test_standard_input() -> None:
    stdin = io.BytesIO(b'{"text": "a"}\n')
    rows = RowSource("-", kind="jsonl", text_column=None, id_column=None, stdin=stdin)
    assert rows.size is None
    assert list(rows) == [Row(index=0, text="a")]
    with pytest.raises(ConfigError, match="parquet cannot"):
        RowSource("-", kind="parquet", text_column=None, id_column=None, stdin=stdin)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        source(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="no header"):
        next(iter(source(write(tmp_path / "empty.csv", ""))))
    with pytest.raises(ConfigError, match="no columns"):
        source(write(tmp_path / "a.txt", "x"), text="text")
    assert list(source(write(tmp_path / "empty.jsonl", ""))) == []


def test_one_row_is_held_at_a_time(tmp_path: Path) -> None:
    """Reading is lazy: a bad line far down does not keep the first rows back."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"t{n}"}) + "\n" for n in range(100)) + "broken\n")
    rows = iter(source(path))
    assert next(rows) == Row(index=0, text="t0")
