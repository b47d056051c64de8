"""``lowmem bench``: what it takes, what it writes, and what it says about bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lowmem.bench.report import Result
from lowmem.bench.units import Column
from lowmem.cli import bench, main


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> list:
    """A workload that takes no time, in the place of all of them."""
    seen: list = []
    module = ModuleType("fake", "A fake workload.")

    def run(args) -> Result:
        seen.append(args)
        rows = [{"contender": "a", "workload": "w", "step_s": 1.0}]
        columns = [Column("contender", "who", "text"), Column("step_s", "step", "s")]
        return Result(args.benchmark, args.command_line, {}, rows, columns)

    module.configure = lambda parser: parser.add_argument("--size", type=int, default=7)
    module.run = run
    monkeypatch.setattr(bench, "_module", lambda name: module)
    return seen


def test_a_result_is_printed_and_written(workload: list, tmp_path: Path, capsys) -> None:
    json, png = tmp_path / "out.json", tmp_path / "out.png"
    assert main(["bench", "slim", "--quick", "--json", str(json), "--plot", str(png)]) == 0
    assert workload[0].quick
    assert workload[0].size == 7
    assert Result.load(json).command == "lowmem bench slim --quick"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "1.00 s" in capsys.readouterr().out


def test_all_runs_every_workload_with_its_own_defaults_and_files(
    workload: list, tmp_path: Path
) -> None:
    assert main(["bench", "all", "--json", str(tmp_path / "out.json")]) == 0
    assert [args.benchmark for args in workload] == ["dsa", "slim", "quality"]
    assert [args.size for args in workload] == [7, 7, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "out-dsa.json",
        "out-quality.json",
        "out-slim.json",
    ]


def test_the_recorded_command_has_no_folder_of_this_machine(workload: list, tmp_path: Path) -> None:
    words = ["bench", "slim", "--directory", str(tmp_path), "--size", "3", f"--json={tmp_path}/r"]
    assert main(words) == 0
    assert workload[0].command_line == "lowmem bench slim --size 3"


def test_the_recorded_command_is_what_was_run(workload: list, tmp_path: Path) -> None:
    folder = tmp_path / "dsa"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_SHARED_MINUTE", {"dsa": [], "slim": ["--size", "2"], "quality": []})
        assert main(["bench", "all", "--quick", "--directory", str(folder)]) == 0
    assert [args.command_line for args in workload] == [
        "lowmem bench dsa --quick",
        "lowmem bench slim --quick --size 2",
        "lowmem bench quality --quick",
    ]
    assert [args.size for args in workload] == [7, 2, 7]


def test_an_option_cut_short_is_refused(workload: list, tmp_path: Path) -> None:
    """Its path would stand in the recorded command."""
    with pytest.raises(SystemExit):
        main(["bench", "slim", "--js", str(tmp_path / "r")])
    assert workload == []


def test_ctrl_c_in_one_ends_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = []

    def run(args):
        begun.append(args.benchmark)
        rows = [{"contender": "a", "workload": "w", "step_s": 1.0}]
        columns = [Column("step_s", "step", "s")]
        return Result("dsa", args.command_line, {}, rows, columns, stopped=True)

    monkeypatch.setattr(bench, "_module", lambda name: module)
    module = ModuleType("made_up")
    module.configure, module.run = lambda parser: parser.add_argument("--seeds"), run
    monkeypatch.setattr(bench, "_SHARED_MINUTE", {key: [] for key in bench.WORKLOADS})
    assert main(["bench", "all", "--quick", "--json", str(tmp_path / "r.json")]) == 130
    assert begun == ["dsa"]
    assert [path.name for path in tmp_path.iterdir()] == ["r-dsa.json"]


@pytest.mark.parametrize("option", ["--json", "--plot", "--directory"])
def test_a_folder_that_is_not_there_is_said_before_the_work(
    workload: list, tmp_path: Path, option: str, capsys
) -> None:
    assert main(["bench", "slim", option, str(tmp_path / "no" / "where")]) == 2
    assert "make it first" in capsys.readouterr().err
    assert workload == []


def test_help_of_the_command_loads_no_torch() -> None:
    code = (
        "import sys; from lowmem.cli import build_parser; build_parser().format_help(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
