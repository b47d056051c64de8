"""Results: stored, read again, shown; the README's tables made from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lowmem.bench.report import Result, main, update_readme
from lowmem.bench.units import Column, format_value


def result(**changes) -> Result:
    fields = {
        "benchmark": "slim",
        "command": "lowmem bench slim",
        "machine": {"cpu": "A CPU", "kernel_threads": 2, "date": "2026-01-02", "python": "3.13"},
        "rows": [
            {"contender": "AdamW", "workload": "w", "step_s": 0.2, "empty": None},
            {"contender": "SlimAdamW", "workload": "w", "step_s": np.float64(0.1)},
        ],
        "columns": [
            Column("contender", "optimizer", "text"),
            Column("step_s", "step", "s"),
            Column("empty", "nothing", "bytes"),
        ],
    }
    return Result(**(fields | changes))


def test_a_result_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "slim.json"
    result(notes=["one"]).save(path)
    again = Result.load(path)
    assert again.markdown() == result(notes=["one"]).markdown()
    assert again.rows[1]["step_s"] == 0.1
    assert again.notes == ["one"]
    assert json.loads(path.read_text())["rows"][0]["contender"] == "AdamW"
    assert [p.name for p in tmp_path.iterdir()] == ["slim.json"]


def test_figures_that_json_cannot_hold_become_null(tmp_path: Path) -> None:
    rows = [{"contender": "a", "step_s": float("nan"), "x": np.float32("inf"), "n": np.int64(3)}]
    result(rows=rows).save(tmp_path / "r.json")
    row = Result.load(tmp_path / "r.json").rows[0]
    assert row == {"contender": "a", "step_s": None, "x": None, "n": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n,", "no JSON.*line 2"),
        ("[]", "no benchmark result"),
        ('{"format": 99}', "format 1 .it says 99"),
        ('{"format": 1}', "not a whole benchmark result"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Result.load(path)


def test_the_table_leaves_out_columns_without_a_figure() -> None:
    table = result().table()
    assert "SlimAdamW" in table
    assert "100 ms" in table
    assert "nothing" not in table
    assert "A CPU, 2 threads" in table
    assert "2026-01-02" in table


def test_the_readme_gets_its_table_between_the_markers_and_nothing_else_changes() -> None:
    text = "above\n<!-- bench:slim -->\nold\n<!-- /bench:slim -->\nbelow\n"
    new = update_readme(text, {"slim": result(), "unasked": result()})
    assert new.startswith("above\n<!-- bench:slim -->\n**w**")
    assert new.endswith("<!-- /bench:slim -->\nbelow\n")
    assert "| SlimAdamW | 100 ms |" in new
    assert "`lowmem bench slim`" in new
    assert "old" not in new
    assert update_readme(new, {"slim": result()}) == new


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench:dsa --><!-- /bench:dsa -->", "no dsa.json"),
        ("<!-- bench:slim -->", "start once and end once"),
        ("<!-- /bench:slim --><!-- bench:slim -->", "ends before it starts"),
        ("<!-- bench:slim --><!-- bench:slim --><!-- /bench:slim -->", "start once"),
    ],
)
def test_markers_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update_readme(text, {"slim": result()})


def test_one_command_makes_the_readme_and_the_pictures(tmp_path: Path, capsys) -> None:
    result().save(tmp_path / "slim.json")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:slim -->\n<!-- /bench:slim -->\n")
    assert main([str(tmp_path), str(readme)]) == 0
    assert "| AdamW | 200 ms |" in readme.read_text()
    assert (tmp_path / "slim.png").read_bytes().startswith(b"\x89PNG")
    assert "updated" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text("{}")
    assert main([str(tmp_path), str(readme)]) == 2
    assert "bad.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0621, "s", "62.1 ms"),
        (12.34, "s", "12.3 s"),
        (4e-6, "s", "4.00 µs"),
        (0.0, "s", "0.00 µs"),
        (1_244_000_000, "bytes", "1.24 GB"),
        (12, "bytes", "12.0 B"),
        (19e9, "bytes/s", "19.0 GB/s"),
        (8.61e6, "rows/s", "8.61 M/s"),
        (0.714, "ratio", "0.71"),
        (0.525, "share", "52 %"),
        (0.0012, "share", "0.12 %"),
        (124439808, "count", "124,439,808"),
        (None, "s", "–"),
        (float("nan"), "s", "–"),
    ],
)
def test_figures_as_people_read_them(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="furlongs"):
        Column("a", "b", "furlongs")


def test_a_regime_shows_its_own_columns_and_no_idle_ones(tmp_path: Path) -> None:
    columns = [
        Column("contender", "who", "text"),
        Column("p50_s", "step\np50", "s"),
        Column("faults", "faults", "number", ("cold",)),
        Column("disk_bytes", "disk", "bytes"),
    ]
    hot = {"contender": "a", "workload": "h", "regime": "hot", "p50_s": 1.0, "faults": 3}
    cold = {**hot, "workload": "c", "regime": "cold"}
    made = result(columns=columns, rows=[{**hot, "disk_bytes": 0}, {**cold, "disk_bytes": 5e9}])
    made.save(tmp_path / "r.json")
    for one in (made, Result.load(tmp_path / "r.json")):
        shown = [[c.key for c in one.shown_columns(rows)] for rows in one.by_workload().values()]
        assert shown == [["contender", "p50_s"], ["contender", "p50_s", "faults", "disk_bytes"]]
    lines = made.table().splitlines()
    assert lines[1:4] == ["         step", "  who     p50", "  ---  ------"]
    assert "| who | step p50 |" in made.markdown()


def test_every_table_of_the_dsa_benchmark_fits_a_terminal() -> None:
    from lowmem.bench.columns import COLUMNS
    from lowmem.bench.contenders import NAMES
    from lowmem.bench.options import REGIMES

    widest = {"text": max(NAMES.values(), key=len), "share": 0.0012, "bytes": 123.4e6}
    widest |= {"s": 0.1234, "rows/s": 123.4e3, "number": 123.4, "count": 123_456}
    for regime in (*REGIMES, "memory"):
        row = {column.key: widest[column.unit] for column in COLUMNS}
        table = result(columns=COLUMNS, rows=[row | {"regime": regime, "workload": "w"}]).table()
        assert max(map(len, table.splitlines())) <= 110, table


def test_results_of_earlier_versions_are_read(tmp_path: Path) -> None:
    data = result().to_dict() | {"columns": [["contender", "optimizer", "text"]]}
    (tmp_path / "r.json").write_text(json.dumps(data, default=float))
    assert Result.load(tmp_path / "r.json").columns == [Column("contender", "optimizer", "text")]
