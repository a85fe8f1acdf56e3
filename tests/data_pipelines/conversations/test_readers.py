"""Every kind of file gives the same rows with exact origins, and what is broken in it costs no other row."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from data_pipelines.conversations.readers import BLOCK_ROWS, Files, LineBlock, limited, open_files
from data_pipelines.conversations.rows import open_source, read_rows

MANY = BLOCK_ROWS * 2 + 100
ROWS = [
    {"messages": [{"role": "user", "content": f"é {i}"}, {"role": "assistant", "content": "ok"}]} for i in range(MANY)
]


def lines(rows: list) -> bytes:
    return b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows)


def write(path: Path, rows: list) -> Path:
    """A file of rows, of the kind that its name says."""
    kinds = path.name.split(".")[1:]
    if kinds[0] == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=1500)
    elif kinds[0] in ("arrow", "feather"):
        table = pa.Table.from_pylist(rows)
        opened = pa.ipc.new_file if kinds[0] == "feather" else pa.ipc.new_stream
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1500)
    else:
        data = json.dumps(rows, indent=1).encode() if kinds[0] == "json" else lines(rows)
        if len(kinds) > 1:
            data = (
                pa.compress(data, codec={"zst": "zstd"}.get(kinds[1], kinds[1]), asbytes=True)
                if kinds[1] != "gz"
                else gzip.compress(data)
            )
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("rows.jsonl", 1),
        ("rows.ndjson", 1),
        ("rows.jsonl.gz", 1),
        ("rows.jsonl.zst", 1),
        ("rows.json", 1),
        ("rows.json.gz", 1),
        ("rows.parquet", 0),
        ("rows.arrow", 0),
        ("rows.feather", 0),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name, first):
    path = write(tmp_path / name, ROWS)
    rows = list(read_rows(str(path)))
    assert [r.data for r in rows] == ROWS and not any(r.problem for r in rows)
    assert [r.origin for r in rows] == [f"{path}:{i}" for i in range(first, first + MANY)]
    assert [r.data for r in read_rows(str(path), max_rows=BLOCK_ROWS + 7)] == ROWS[: BLOCK_ROWS + 7]
    blocks = list(open_source(str(path)).blocks())
    assert max(b.count for b in blocks) <= BLOCK_ROWS and sum(b.count for b in blocks) == MANY
    again = [r for b in blocks for r in pickle.loads(pickle.dumps(b)).rows()]
    assert again == rows


def test_json_lines_under_the_name_of_json_are_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(lines(ROWS[:3]))
    assert [r.data for r in read_rows(str(path))] == ROWS[:3]


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "z.jsonl", ROWS[3:5])
    write(tmp_path / "a.parquet", ROWS[:3])
    write(tmp_path / "c.jsonl.gz", ROWS[5:6])
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / ".cache.jsonl").write_text("no rows")
    rows = list(read_rows(str(tmp_path)))
    assert [r.data for r in rows] == ROWS[:6]
    assert [r.origin for r in rows][2:4] == [f"{tmp_path}/a.parquet:2", f"{tmp_path}/b/z.jsonl:1"]


def test_every_line_of_a_file_is_a_row_or_a_problem(tmp_path):
    file = tmp_path / "rows.jsonl"
    good = lines(ROWS[:1])
    parts = [b"\xef\xbb\xbf" + good, b"\n", b"{broken\n", b"[1]\n", b"\xff\xfe\n", b'{"text": "\\ud800"}\n', b"  \t\n"]
    parts += [b"[" * 100_000 + b"\n", b'{"text": NaN}\n', good.replace(b"\n", b"\r\n"), good.strip()]
    file.write_bytes(b"".join(parts))
    rows = list(read_rows(str(file)))
    assert [r.origin.rsplit(":", 1)[1] for r in rows] == ["1", "3", "4", "5", "6", "8", "9", "10", "11"]
    not_ours = ["the line is not JSON", "the line is not a JSON object", "the line is not UTF-8"]
    assert [r.problem for r in rows[:4]] == ["", *not_ours]
    assert "lone surrogate" in rows[4].problem and rows[5].problem == not_ours[0]
    assert rows[7].data == rows[8].data == ROWS[0]
    assert len(list(read_rows(str(file), max_rows=2))) == 2
    counted = sum(b.count for b in Files([(file, "rows")]).blocks())
    assert counted == len(rows)


def test_a_damaged_file_gives_what_comes_before_the_damage(tmp_path):
    whole = write(tmp_path / "rows.jsonl.gz", ROWS).read_bytes()
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    *good, last = read_rows(str(tmp_path / "rows.jsonl.gz"))
    assert len(good) < MANY and not last.data

    whole = json.dumps(ROWS[:9]).encode()
    (tmp_path / "rows.json").write_bytes(whole[:-40])
    *good, last = read_rows(str(tmp_path / "rows.json"))
    assert [r.data for r in good] == ROWS[:8] and "broken from here on" in last.problem
    assert last.origin.endswith(":9")

    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and nothing else")
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    assert "damaged" in row.problem


def test_a_table_s_nulls_are_keys_that_the_row_did_not_have(tmp_path):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Paris"}}}],
    }
    other = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g", "arguments": {"day": 3}}}]}
    given = [{"messages": [{"role": "user", "content": "Hi"}, turn], "note": None} for turn in (call, other)]
    write(tmp_path / "rows.parquet", given)
    rows = [r.data for r in read_rows(str(tmp_path / "rows.parquet"))]
    assert [r["messages"][1]["tool_calls"][0]["function"]["arguments"] for r in rows] == [{"city": "Paris"}, {"day": 3}]
    assert rows[0].keys() == {"messages"} and rows[0]["messages"][0].keys() == {"role", "content"}


def test_datasets_by_split_and_configuration_streamed_and_saved(tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", ROWS[:3])
    write(tmp_path / "set" / "test.jsonl", ROWS[3:5])
    name = f"hf:{tmp_path}/set"
    for streaming in (False, True):
        rows = list(open_source(name, 2, streaming=streaming).make())
        assert [r.data for r in rows] == ROWS[:2]
        assert rows[1].origin == f"{tmp_path}/set:train:1"
    assert [r.data for r in read_rows(f"{name}:test")] == ROWS[3:5]
    assert [r.data for r in read_rows(f"{name}:default:test")] == ROWS[3:5]
    assert [r.data for r in read_rows(f"{name}:default")] == ROWS[:3]

    dataset = datasets.Dataset.from_list(ROWS[:4])
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(tmp_path / "splits")
    assert [r.data for r in read_rows(str(tmp_path / "saved"))] == ROWS[:4]
    assert [r.data for r in read_rows(f"hf:{tmp_path}/splits:test")] == ROWS[1:2]
    assert [r.data for r in read_rows(str(tmp_path / "splits" / "test"))] == ROWS[1:2]


def test_lines_are_cut_into_blocks_by_their_bytes_too(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipelines.conversations.readers.BLOCK_BYTES", 1000)
    path = write(tmp_path / "rows.jsonl", ROWS[:100])
    blocks = list(open_files(path, "rows").blocks())
    assert len(blocks) > 5 and all(isinstance(b, LineBlock) and b.size < 1200 for b in blocks)
    assert [r.origin for b in limited(iter(blocks), 41) for r in b.rows()] == [f"rows:{i}" for i in range(1, 42)]
