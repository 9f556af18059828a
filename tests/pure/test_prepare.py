"""Owns the proof of `rankmesh prepare`: what is kept, what is counted, what is refused."""

import json
import tracemalloc
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from rankmesh.cli.main import main
from rankmesh.data.indexed import TokenFile
from rankmesh.data.meta import TokenMeta
from rankmesh.data.prepare import PrepareOptions, prepare
from rankmesh.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from rankmesh.errors import DataError

EOD = 256


def run(out: Path, *inputs: Path, **options: object) -> TokenMeta:
    """Prepares with bytes, and checks what was written against what was reported."""
    chosen = {"inputs": inputs, "out": str(out), "tokenizer": "bytes", **options}
    meta = prepare(PrepareOptions(**chosen)).meta  # type: ignore[arg-type]
    file = TokenFile(out)
    assert file.meta == meta
    assert meta.max_token == file.tokens(0, file.num_tokens).max()
    assert all(file.document(i).size for i in range(file.num_documents))
    return meta


def documents(prefix: Path) -> list[list[int]]:
    """All documents of a token file."""
    file = TokenFile(prefix)
    return [file.document(i).tolist() for i in range(file.num_documents)]


def texts(prefix: Path) -> list[str]:
    """All documents of a byte-tokenized file, decoded."""
    return [ByteTokenizer().decode(ids) for ids in documents(prefix)]


def lines(path: Path, *rows: bytes | dict[str, object]) -> Path:
    """A file of lines; dictionaries are written as JSON."""
    path.write_bytes(
        b"".join(
            (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
        )
    )
    return path


@pytest.mark.parametrize("append_eod", [True, False])
def test_empty_documents_are_left_out_and_counted(tmp_path: Path, append_eod: bool) -> None:
    """Field report X06: empty text first, in the middle and last, white space, a missing key."""
    source = lines(
        tmp_path / "in.jsonl",
        {"text": ""},
        {"text": "one"},
        {"text": ""},
        {"text": " \n\t"},
        b"",
        b"   ",
        {"body": "x"},
        {"text": "two!"},
        {"text": ""},
    )
    meta = run(tmp_path / "out", source, append_eod=append_eod)
    assert texts(tmp_path / "out") == ["one", "two!"]
    assert meta.num_documents == 2 and meta.text_bytes == 7
    assert meta.num_tokens == 7 + 2 * append_eod
    assert meta.skipped == {"empty": 4, "missing key": 1, "only white space": 2}
    assert [ids.count(EOD) for ids in documents(tmp_path / "out")] == [append_eod] * 2


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"text": "\xff\xfe"}', "invalid UTF-8"),
    (b'{"text": "unfinished', "broken JSON"),
    (b'{"text": "tab\there"}', "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b'{"text": ' + b"9" * 5_000 + b"}", "broken JSON"),
    (b'{"text": "a\\u0000b"}', "NUL character"),
    (b'{"text": "a\0b"}', "NUL character"),
    (b'{"text": "a\\ud800b"}', "lone surrogate"),
    (b'["text"]', "not a JSON object"),
    (b'{"text": 7}', "value is not text"),
    (b'{"text": null}', "value is not text"),
    (b'{"body": "x"}', "missing key"),
    (b'{"text": ""}', "empty"),
    (b'{"text": " "}', "only white space"),
]


def test_bad_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    """Field report X18: no line stops the job; each is counted under its reason."""
    rows = [row for bad, _ in BAD_LINES for row in (bad, {"text": "good"})]
    meta = run(tmp_path / "out", lines(tmp_path / "in.jsonl", *rows))
    assert texts(tmp_path / "out") == ["good"] * len(BAD_LINES)
    reasons = [reason for _, reason in BAD_LINES]
    assert meta.skipped == {reason: reasons.count(reason) for reason in sorted(set(reasons))}


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES)
def test_strict_stops_at_a_bad_line(tmp_path: Path, bad: bytes, reason: str) -> None:
    """Field report X18: naming file and line number, and leaving nothing behind."""
    source = lines(tmp_path / "in.jsonl", {"text": "good"}, {"text": "good"}, bad)
    with pytest.raises(DataError) as caught:
        run(tmp_path / "out", source, strict=True)
    assert str(caught.value).startswith(f"{source}:3: {reason}")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_a_line_of_50_megabytes(tmp_path: Path) -> None:
    """Field report X18: it is a document like any other, and memory stays near its size."""
    size = 50_000_000
    source = lines(tmp_path / "in.jsonl", {"text": "a"}, {"text": "x" * size}, {"text": "b"})
    tracemalloc.start()
    meta = run(tmp_path / "out", source, workers=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert meta.num_tokens == size + 5 and meta.skipped == {}
    assert peak < 10 * size


def test_many_lines_take_no_memory(tmp_path: Path) -> None:
    """15 MB in 2,000 documents: what is held is a block of 1 MB in its forms, text and ids."""
    source = lines(tmp_path / "in.jsonl", *[{"text": f"{i} " * 1700} for i in range(2_000)])
    assert source.stat().st_size > 15_000_000
    tracemalloc.start()
    meta = run(tmp_path / "out", source, workers=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert meta.num_documents == 2_000
    assert peak < 14_000_000


def test_text_files_and_json_lines_in_the_order_given(tmp_path: Path) -> None:
    """A text file is one document, line ends and all; a byte order mark is no text."""
    first = lines(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"text": "one"}\r', {"text": "two", "x": [1]})
    second = tmp_path / "a.txt"
    second.write_bytes(b"\xef\xbb\xbfline\r\n\n  line \xc3\xa9\n")
    third = tmp_path / "no ending"
    third.write_bytes(b"three")
    meta = run(tmp_path / "deep" / "er" / "out.v1", first, second, third)
    assert texts(tmp_path / "deep" / "er" / "out.v1") == [
        "one",
        "two",
        "line\r\n\n  line \u00e9\n",
        "three",
    ]
    assert meta.text_bytes == 3 + 3 + 17 + 5


def test_the_format_and_the_key_can_be_named(tmp_path: Path) -> None:
    """JSON lines under another ending, JSON as text, another key."""
    source = lines(tmp_path / "in.dat", {"body": "x"})
    run(tmp_path / "lines", source, kind="jsonl", jsonl_key="body")
    assert texts(tmp_path / "lines") == ["x"]
    renamed = source.rename(tmp_path / "in.json")
    run(tmp_path / "text", renamed, kind="text")
    assert texts(tmp_path / "text") == ['{"body": "x"}\n']


@pytest.mark.parametrize(
    ("content", "reason", "line"),
    [
        (b"a\nb\n\xff\n", "invalid UTF-8", 3),
        (b"a\nb\0\n", "NUL character", 2),
        (b"", "empty", 1),
        (b"\n \n", "only white space", 1),
    ],
)
def test_bad_text_files(tmp_path: Path, content: bytes, reason: str, line: int) -> None:
    """Field report X18: counted, or fatal with the line at which a person finds the fault."""
    bad, good = tmp_path / "bad.txt", tmp_path / "good.txt"
    bad.write_bytes(content)
    good.write_bytes(b"good")
    assert run(tmp_path / "out", bad, good).skipped == {reason: 1}
    with pytest.raises(DataError, match=reason) as caught:
        run(tmp_path / "strict", good, bad, strict=True)
    assert str(caught.value).startswith(f"{bad}:{line}: ")


@pytest.mark.parametrize("habit", ["adds none", "adds begin", "adds end", "adds both"])
@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("prepend_bos", [True, False])
def test_marks_are_those_asked_for_once_each(
    tmp_path: Path, habit: str, append_eod: bool, prepend_bos: bool
) -> None:
    """Field report X08: whatever the post-processor adds, and where a document spells a mark."""
    words = ["a cat sat", "<s> on <|endoftext|> a mat"]
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe(words, 300, tokenizer)
    engine = tokenizers.Tokenizer.from_file(str(tokenizer))
    engine.add_special_tokens(["<s>"])
    begin, end = engine.token_to_id("<s>"), engine.token_to_id("<|endoftext|>")
    template = (["<s>"] if habit[5:] in ("begin", "both") else []) + ["$A"]
    template += ["<|endoftext|>"] if habit[5:] in ("end", "both") else []
    engine.post_processor = processors.TemplateProcessing(
        single=" ".join(template), special_tokens=[("<s>", begin), ("<|endoftext|>", end)]
    )
    engine.save(str(tokenizer))
    source = lines(tmp_path / "in.jsonl", *[{"text": text} for text in words])
    meta = run(
        tmp_path / "out",
        source,
        tokenizer=str(tokenizer),
        append_eod=append_eod,
        prepend_bos=prepend_bos,
    )
    assert (meta.append_eod, meta.prepend_bos) == (append_eod, prepend_bos)
    assert (meta.eod_id, meta.bos_id) == (end, begin)
    for ids, text in zip(documents(tmp_path / "out"), words, strict=True):
        assert (ids.count(begin), ids.count(end)) == (prepend_bos, append_eod)
        bare = ids[prepend_bos : len(ids) - append_eod]
        assert load_tokenizer(str(tokenizer)).decode(bare) == text
        assert not prepend_bos or ids[0] == begin
        assert not append_eod or ids[-1] == end


def test_an_end_mark_that_does_not_exist(tmp_path: Path) -> None:
    """Asked for and not there: refused before anything is read."""
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe(["abc"], 258, tokenizer)
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "!?"))
    source = lines(tmp_path / "in.jsonl", {"text": "abc"})
    with pytest.raises(DataError, match="names no end-of-document token: give --eod-token"):
        run(tmp_path / "out", source, tokenizer=str(tokenizer))
    run(tmp_path / "out", source, tokenizer=str(tokenizer), eod_token="!?")
    assert documents(tmp_path / "out")[0][-1] == 0
    run(tmp_path / "out", source, tokenizer=str(tokenizer), append_eod=False)
    assert 0 not in documents(tmp_path / "out")[0]
    marks = {"tokenizer": str(tokenizer), "eod_token": "!?", "prepend_bos": True}
    with pytest.raises(DataError, match="names no begin-of-document token: give --bos-token"):
        run(tmp_path / "out", source, **marks)
    run(tmp_path / "out", source, **marks, bos_token="c")
    assert documents(tmp_path / "out")[0][0] == load_tokenizer(str(tokenizer)).encode("c")[0]


def test_a_text_without_tokens_is_left_out(tmp_path: Path) -> None:
    """Some tokenizers drop what they do not know; no empty document is written for it."""
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe(["abc"], 258, tokenizer)
    content = json.loads(tokenizer.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^a-z]"}, "content": ""}
    tokenizer.write_text(json.dumps(content))
    source = lines(tmp_path / "in.jsonl", {"text": "abc"}, {"text": "123"})
    assert run(tmp_path / "out", source, tokenizer=str(tokenizer)).skipped == {"no tokens": 1}
    with pytest.raises(DataError, match="in.jsonl:2: no tokens"):
        run(tmp_path / "strict", source, tokenizer=str(tokenizer), strict=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.txt", "no such file"),
        ("folder", "a folder without files to read"),
        ("in.tar", ".tar files are not read"),
        ("in.zip.gz", ".zip files are not read"),
        ("in.parquet.gz", "parquet is compressed inside; .gz around it is not read"),
        ("*.md", "no such file, and as a pattern it matches none"),
        ("out.bin", ".bin files are not read"),
        ("out.meta.json", "is both an input and an output"),
    ],
)
def test_inputs_that_are_refused(tmp_path: Path, name: str, words: str) -> None:
    """One line with the file's name; no file is touched."""
    (tmp_path / "folder").mkdir()
    if name not in ("missing.txt", "folder", "*.md"):
        (tmp_path / name).write_bytes(b"x")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError) as caught:
        run(tmp_path / "out", tmp_path / name)
    assert words in str(caught.value) and name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_no_document_left(tmp_path: Path) -> None:
    """The reasons are in the error; an older file of that name stays."""
    run(tmp_path / "out", lines(tmp_path / "good.jsonl", {"text": "old"}))
    with pytest.raises(DataError, match="no document left in 1 file: 1 broken JSON, 2 empty"):
        run(tmp_path / "out", lines(tmp_path / "in.jsonl", b"{", b"", {"text": ""}))
    assert texts(tmp_path / "out") == ["old"]


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where a folder should be."""
    source = lines(tmp_path / "in.jsonl", {"text": "x"})
    with pytest.raises(DataError, match="cannot be written"):
        run(source / "out", source)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures for people, the same for machines, exit code 0; 2 where the input is wrong."""
    source = lines(tmp_path / "in.jsonl", {"t": "abcd"}, {"t": ""}, b"{")
    words = ["prepare", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert main([*words, "--jsonl-key", "t", "--no-append-eod"]) == 0
    text = capsys.readouterr().out
    assert "4 tokens in 1 documents (vocabulary 257, largest id 100)" in text
    assert "4 bytes of text, 1.00 a token" in text
    assert "half of them fewer than 8, the longest 4" in text
    assert f"skipped 2: 1 broken JSON (first: {source}:3), 1 empty (first: {source}:2)" in text
    assert main([*words, "--jsonl-key", "t", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_tokens"], found["append_eod"]) == (5, True)
    assert found["skipped"] == {"broken JSON": 1, "empty": 1}
    assert found["skipped_first"]["empty"] == f"{source}:2"
    assert main([*words, "--jsonl-key", "t", "--strict"]) == 2
    assert capsys.readouterr().err == f"rankmesh: error: {source}:2: empty\n"
    assert main(words) == 2
    assert "no document left in 1 file: 1 broken JSON, 2 missing key" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["p/", ".", "..", "p/.", "p/.."])
def test_a_folder_is_no_prefix(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would become hidden files such as p/.bin; a prefix beside a folder of its name is fine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    source = lines(tmp_path / "in.jsonl", {"text": "abcd"})
    words = ["prepare", str(source), "--tokenizer", "bytes", "--out"]
    assert main([*words, out]) == 2
    assert f"--out {out}: is a folder; expected a prefix" in capsys.readouterr().err
    assert {path.name for path in tmp_path.rglob("*")} == {"p", "in.jsonl"}
    assert main([*words, "p"]) == 0 and (tmp_path / "p.bin").is_file()
