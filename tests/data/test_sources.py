"""Files to records: as written, with the line that each stands on; what is damaged is named."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snugtune.data import sources
from snugtune.data.sources import DEMO_INTENTS, Record, check, read
from snugtune.errors import DataError
from snugtune.recipe import DataSource

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ä\u2028x", "completion": "c\nd"}]


def _write(folder, name, content):
    path = folder / name
    content = content if isinstance(content, bytes) else content.encode("utf-8")
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def _read(folder, name, content):
    return list(read(_write(folder, name, content)))


def _jsonl(rows, *, newline="\n", ascii_only=False):
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + newline for row in rows)


def _csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# --- every format ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    ("suffix", "content", "lines"),
    [
        (".jsonl", _jsonl(ROWS), [1, 2]), (".JSONL", _jsonl(ROWS, newline="\r\n"), [1, 2]),
        (".json", json.dumps(ROWS, indent=1), [1, 2]), (".json", json.dumps({"version": 1, "data": ROWS}), [1, 2]),
        (".csv", _csv(ROWS), [2, 3]),
    ],
)  # fmt: skip
def test_rows_come_back_as_written_with_their_lines(tmp_path, suffix, content, lines, packed):
    name = f"rows{suffix}{packed}"
    place = f"{name} row " if suffix == ".json" else f"{name}:"
    assert _read(tmp_path, name, content) == [Record(f"{place}{n}", row) for n, row in zip(lines, ROWS, strict=True)]


def test_text_is_cut_into_paragraphs(tmp_path):
    found = _read(tmp_path, "book.txt", "\n\none\r\n two\u2028three \r\n \t\r\n\nfour")
    assert found == [
        Record("book.txt:3", {"text": "one\n two\u2028three "}),
        Record("book.txt:7", {"text": "four"}),
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.csv.gz"])
def test_a_byte_order_mark_changes_nothing(tmp_path, name):
    content = {"jsonl": _jsonl(ROWS), "json": json.dumps(ROWS), "csv": _csv(ROWS), "txt": "one\n"}[name.split(".")[1]]
    assert _read(tmp_path, name, b"\xef\xbb\xbf" + content.encode()) == _read(tmp_path, name, content)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_blank_lines_are_passed_over_and_counted(tmp_path, newline):
    content = newline.join(['{"text": "a"}', "", "  ", '{"text": "b"}'])
    assert [r.where for r in _read(tmp_path, "rows.jsonl", content)] == ["rows.jsonl:1", "rows.jsonl:4"]
    content = newline.join(["text", "a", "", "b", ""])
    assert [r.where for r in _read(tmp_path, "rows.csv", content)] == ["rows.csv:2", "rows.csv:4"]


def test_a_quoted_newline_does_not_shift_line_numbers(tmp_path):
    content = 'prompt,completion\n"a\r\nb\n\nc",1\nd,2\n"""e""\nf",3\n\ng,4\n'
    assert _read(tmp_path, "rows.csv", content) == [
        Record("rows.csv:2", {"prompt": "a\r\nb\n\nc", "completion": "1"}),
        Record("rows.csv:6", {"prompt": "d", "completion": "2"}),
        Record("rows.csv:7", {"prompt": '"e"\nf', "completion": "3"}),
        Record("rows.csv:10", {"prompt": "g", "completion": "4"}),
    ]


@pytest.mark.parametrize("word", ["NA", "N/A", "null", "None", "nan", "NaN", "", "true", "1e5", "007", " "])
def test_words_that_look_like_nothing_stay_words(tmp_path, word):
    row = {"prompt": "x", "completion": word}
    assert [r.fields for r in _read(tmp_path, "rows.csv", _csv([row]))] == [row]
    assert [r.fields for r in _read(tmp_path, "rows.jsonl", _jsonl([row]))] == [row]


def test_json_values_keep_their_kinds(tmp_path):
    row = {"a": None, "b": 1, "c": 1.5, "d": True, "e": ["x"], "f": {"g": ""}}
    assert [r.fields for r in _read(tmp_path, "rows.jsonl", _jsonl([row]))] == [row]


def test_the_order_of_kinds_does_not_matter(tmp_path):
    rows = [{"completion": None}] * 3 + [{"completion": 3.5}, {"completion": "n/a"}, {"other": 1}]
    assert [r.fields for r in _read(tmp_path, "rows.jsonl", _jsonl(rows))] == rows
    assert [r.fields for r in _read(tmp_path, "rows.jsonl", _jsonl(rows[::-1]))] == rows[::-1]


def test_half_a_surrogate_pair_is_passed_on(tmp_path):
    row = {"text": "a\ud83d b", "other": "\ud83d\ude00"}
    found = _read(tmp_path, "rows.jsonl", _jsonl([row], ascii_only=True))
    assert found[0].fields == {"text": "a\ud83d b", "other": "😀"}


def test_a_very_long_cell_is_read(tmp_path):
    rows = [{"prompt": "word " * 50_000, "completion": "b"}]
    assert [r.fields for r in _read(tmp_path, "rows.csv", _csv(rows))] == rows


# Every character but the half surrogates, which no UTF-8 file can hold as they are.
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_odd = st.sampled_from(
    ["\u2028", "\x85", "\r", "\n", "\r\n", '"', ",", "\ufeff", "\x0b", "\x0c", "\x1c", "'", "\\", "NA"]
)
_cell = st.lists(_odd | _text, max_size=4).map("".join)


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(_cell, st.none() | st.booleans() | st.integers() | _cell | st.lists(_cell), max_size=4))
)
@example([{"\ufeff": "\ufeff"}])
def test_any_jsonl_comes_back_exactly(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(_jsonl(rows).encode())
    found = list(read(str(path)))
    assert [r.fields for r in found] == rows
    assert [r.where for r in found] == [f"any.jsonl:{n}" for n in range(1, len(rows) + 1)]


@settings(deadline=None)
@given(st.data())
def test_any_csv_comes_back_exactly(tmp_path_factory, data):
    names = data.draw(st.lists(_cell.filter(lambda n: not n.startswith("\ufeff")), min_size=1, max_size=3, unique=True))
    rows = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, _cell)), max_size=5))
    path = tmp_path_factory.getbasetemp() / "any.csv"
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerows([names, *([row[name] for name in names] for row in rows)])
    path.write_bytes(text.getvalue().encode())
    found = list(read(str(path)))
    assert [r.fields for r in found] == rows
    first_lines = []
    line = 1 + sum(len(_line_ends(name)) for name in names)
    for row in rows:
        first_lines.append(line + 1)
        line += 1 + sum(len(_line_ends(cell)) for cell in row.values())
    assert [int(r.where.split(":")[1]) for r in found] == first_lines


def _line_ends(cell):
    return cell.replace("\r\n", "\n").replace("\r", "\n").split("\n")[1:]


# --- what is damaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3 is not JSON"),
        ("a.jsonl", '{"text": "a"} {"text": "b"}\n', r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"a\.jsonl:2 is a list, not an object"),
        ("a.jsonl", '"text"\n', r"a\.jsonl:1 is a str, not an object"),
        ("a.json", '[{"text": "a"}, 3]', r"a\.json row 2 is a int, not an object"),
        ("a.json", '[{"text": "a"}', r"a\.json is not JSON.*line 1"),
        ("a.json", "[" * 100_000, r"a\.json is not JSON"),
        ("a.json", "3", r"a\.json holds no list of rows"),
        ("a.json", '{"a": [], "b": []}', r"a\.json holds no list of rows"),
        ("a.json", "", r"a\.json is not JSON"),
        ("a.csv", "a,b\n1,2\n\n3\n", r"a\.csv:4 has 1 cells, the header has 2"),
        ("a.csv", "a,b\n1,2,3\n", r"a\.csv:2 has 3 cells, the header has 2"),
        ("a.csv", "a,b,a\n1,2,3\n", r"a\.csv:1 names a column twice: a, b, a"),
        ("a.csv", 'a,b\n1,2\n"3,4\n', r"a\.csv:3 is not CSV"), ("a.csv", 'a,b\n"1"x,2\n', r"a\.csv:2 is not CSV"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', r"a\.jsonl:2 is not UTF-8"),
        ("a.jsonl.gz", b'{"text": "a"}\n{"text": "caf\xe9"}\n', r"a\.jsonl\.gz:2 is not UTF-8"),
        ("a.json", b'[\n{"text": "caf\xe9"}]', r"a\.json:2 is not UTF-8"),
        ("a.csv", b"text\ncaf\xe9\n", r"a\.csv:2 is not UTF-8"),
        ("a.txt", b"fine\n\n\n\xff\n", r"a\.txt:4 is not UTF-8"), ("a.txt", "text".encode("utf-16"),
        r"a\.txt:1 is not UTF-8"),
        ("a.jsonl", b'{"text": "cut in a chara\xe2\x82', r"a\.jsonl:1 is not UTF-8"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_its_place(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        _read(tmp_path, name, content)


def test_bytes_that_are_no_text_are_found_far_into_a_file(tmp_path):
    with pytest.raises(DataError, match=r"a\.txt:30001 is not UTF-8"):
        _read(tmp_path, "a.txt", b"fine\n" * 30_000 + b"\xe9\n")


def test_a_damaged_archive_is_refused_by_name(tmp_path):
    whole = gzip.compress(_jsonl([{"text": str(n)} for n in range(5000)]).encode())
    for cut in (whole[:-4], whole[: len(whole) // 2], b"not gzip at all", whole[:50] + b"\0\0\0\0" + whole[54:]):
        path = tmp_path / "rows.jsonl.gz"
        path.write_bytes(cut)
        with pytest.raises(DataError, match=r"rows\.jsonl\.gz is damaged"):
            list(read(str(path)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.jsonl.gz"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_gives_none(tmp_path, name, content):
    if name == "a.csv" and content:
        content = "text\n\n"
    assert _read(tmp_path, name, content) == []


def test_a_list_without_rows_gives_none(tmp_path):
    assert _read(tmp_path, "a.json", "[]") == []


def test_a_folder_a_missing_file_and_an_unknown_format_are_refused_before_reading(tmp_path):
    for name, message in (
        (str(tmp_path), "is a folder"), (str(tmp_path / "absent.jsonl"), "there is no data at"),
        ("demoo", "there is no data at"),
        (_write(tmp_path, "rows.xlsx", ""), "in no format"), (_write(tmp_path, "rows", ""), "in no format"),
        (_write(tmp_path, "rows.gz", ""), "in no format"), (_write(tmp_path, "rows.csv.zip", ""), "in no format"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message) as refused:
            check(name)
        assert name in str(refused.value) and ".jsonl" in str(refused.value)
        with pytest.raises(DataError, match=message):
            list(read(name))


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    name = _write(tmp_path, "rows.jsonl", "")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources.Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot be read.*Permission denied"):
        list(read(name))


# --- the packaged data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "rows"), [("train", 10003), ("test", 3080)])
def test_banking77_is_whole(part, rows):
    found = list(read("banking77", part=part))
    assert len(found) == rows
    assert len({r.fields["completion"] for r in found}) == 77
    assert all(len(r.fields["choices"]) == 77 and r.fields["completion"] in r.fields["choices"] for r in found)
    assert len({r.where for r in found}) == rows, "two rows say that they stand at the same place"


@pytest.mark.parametrize("part", ["train", "test"])
def test_the_demo_is_its_ten_intents_of_banking77(part):
    found = list(read("demo", part=part))
    wanted = {" " + intent.replace("_", " ") for intent in DEMO_INTENTS}
    counts = Counter(r.fields["completion"] for r in found)
    assert set(counts) == wanted and len(wanted) == 10 and min(counts.values()) >= 40, counts
    assert all(r.fields["choices"] == sorted(wanted) for r in found)
    whole = {(r.where, r.fields["prompt"]): r.fields["completion"] for r in read("banking77", part=part)}
    assert all(whole[r.where, r.fields["prompt"]] == r.fields["completion"] for r in found)


# --- columns, broken lines, parquet, the hub -------------------------------------------------------------------------


def _fields(source, **options):
    return [record.fields for record in read(source, **options)]


def test_columns_are_read_under_the_names_that_we_know(tmp_path):
    path = _write(tmp_path, "rows.jsonl", _jsonl([{"q": "a", "reply": "b", "prompt": "old", "id": 1}]))
    source = DataSource(path=str(path), columns={"prompt": "q", "completion": "reply"})
    assert _fields(source) == [{"prompt": "a", "completion": "b", "id": 1}]


def test_a_column_that_a_row_lacks_is_not_made_up(tmp_path):
    path = _write(tmp_path, "rows.jsonl", _jsonl([{"q": "a"}]))
    assert _fields(DataSource(path=str(path), columns={"prompt": "q", "completion": "reply"})) == [{"prompt": "a"}]


def test_broken_lines_are_told_and_left_out_where_that_is_asked_for(tmp_path):
    path, told = _write(tmp_path, "rows.jsonl", '{"text": "a"}\n{"text": \n\n{"text": "b"}\n'), []
    assert _fields(str(path), broken=lambda *at: told.append(at)) == [{"text": "a"}, {"text": "b"}]
    assert told == [("the line is no JSON", "rows.jsonl:2")]
    with pytest.raises(DataError, match=r"rows\.jsonl:2 is not JSON .*data\.skip_broken_lines=true"):
        _fields(str(path))


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")) | st.none()))
)
def test_any_parquet_comes_back_exactly(tmp_path_factory, rows):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    columns = {"prompt": [row[0] for row in rows], "completion": [row[1] for row in rows]}
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("completion", pyarrow.string())])
    parquet.write_table(pyarrow.table(columns, schema=schema), path)
    assert _fields(str(path)) == [{"prompt": a, "completion": b} for a, b in rows]


def test_conversations_in_parquet_are_lists(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    parquet.write_table(pyarrow.table({"messages": [turns]}), tmp_path / "rows.parquet")
    assert [(r.where, r.fields) for r in read(str(tmp_path / "rows.parquet"))] == [
        ("rows.parquet row 1", {"messages": turns})
    ]


def test_a_damaged_parquet_is_refused_by_name(tmp_path):
    pytest.importorskip("pyarrow")
    path = _write(tmp_path, "rows.parquet", b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read after row 0"):
        _fields(str(path))


def test_what_a_missing_library_would_read_says_how_to_bring_it(tmp_path, monkeypatch):
    path = _write(tmp_path, "rows.parquet", b"")

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(sources.importlib, "import_module", absent)
    with pytest.raises(DataError, match=r"needs pyarrow; bring it with: pip install 'snugtune\[data\]'"):
        check(str(path))
    with pytest.raises(DataError, match=r"owner/name is no file here.*pip install 'snugtune\[data\]'"):
        _fields("owner/name")


def test_an_id_of_the_hub_is_read_through_datasets(monkeypatch):
    class Library:
        @staticmethod
        def load_dataset(name, *, split):
            assert (name, split) == ("owner/name", "train")
            return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setattr(sources.importlib, "import_module", lambda name: Library)
    assert [(r.where, r.fields["text"]) for r in read("owner/name")] == [
        ("owner/name row 1", "a"),
        ("owner/name row 2", "b"),
    ]


def test_a_hub_that_gives_nothing_is_a_message(monkeypatch):
    class Library:
        @staticmethod
        def load_dataset(name, *, split):
            raise ConnectionError("offline\nand more")

    monkeypatch.setattr(sources.importlib, "import_module", lambda name: Library)
    with pytest.raises(DataError, match=r"there is no data at owner/name: .*\(offline\)$"):
        _fields("owner/name")


@pytest.mark.parametrize("name", ["data/rows.jsonl", "data/rows.csv.gz", "./rows", "../a/b", "/a/b"])
def test_a_mistyped_path_never_goes_to_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources.importlib, "import_module", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match="there is no data at"):
        check(name)


def test_a_name_in_a_folder_that_is_here_is_a_mistyped_path(monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no data at data/rows"):
        check("data/rows")
