"""`lowmem demo` as a person runs it: in a process of its own, small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowmem.cli import main


def command(tmp_path: Path, *flags: str, smoke: bool = True) -> tuple[list[str], dict]:
    environment = os.environ | {
        "LOWMEM_SMOKE": "1" if smoke else "0",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return [sys.executable, "-m", "lowmem", "demo", *flags], environment


def demo(tmp_path: Path, *flags: str, smoke: bool = True) -> subprocess.CompletedProcess[str]:
    line, environment = command(tmp_path, *flags, smoke=smoke)
    return subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )


def test_smoke(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (
        "Graph: the Python code on this machine",
        "of its rows have names",
        "untrained  MRR",
        "trained    MRR",
        "DSA, optimizer state, measured",
        "SparseAdam would need",
        "dense Adam would need",
        "Nearest neighbours",
        "The temporary store is removed",
    ):
        assert part in done.stdout, done.stdout
    assert "training" in done.stderr  # the bar
    assert "rows/s" in done.stderr
    facts = json.loads((tmp_path / "demo_out" / "lowmem_demo.json").read_text())
    assert facts["ranking"]["trained"]["mrr"] > 10 * facts["ranking"]["untrained"]["mrr"]
    assert facts["optimizer_state_bytes"]["vram"] == 0
    assert facts["optimizer_state_bytes"]["disk"] >= 200_000 * 32 * 8
    assert (tmp_path / "demo_out" / "lowmem_demo.png").read_bytes().startswith(b"\x89PNG")
    # Nothing else is left behind.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "demo_out"]


def family(path: Path) -> Path:
    lines = [f"e{i}\tnext\te{(i + 1) % 50}\ne{i}\twith\te{i ^ 1}\n" for i in range(50)]
    path.write_text("".join(lines))
    return path


def test_own_triples_and_a_kept_directory(tmp_path: Path) -> None:
    flags = (
        "--triples",
        str(family(tmp_path / "g.tsv")),
        "--directory",
        "kept",
        "--rows",
        "1e3",
        "--dim",
        "8",
        "--seconds",
        "1",
    )
    done = demo(tmp_path, *flags, smoke=False)
    assert done.returncode == 0, done.stderr
    assert "50 entities, 2 relations, 100 triples" in done.stdout
    assert "Table: 1,000 x 8 on" in done.stdout
    assert "The store of the moments is kept: kept/store" in done.stdout
    kept = tmp_path / "kept"
    assert {"store", "lowmem_demo.png", "lowmem_demo.json"} <= {p.name for p in kept.iterdir()}
    assert json.loads((kept / "lowmem_demo.json").read_text())["command"].endswith(
        "--rows 1000 --dim 8 --seconds 1.0 --directory kept --triples " + str(tmp_path / "g.tsv")
    )

    again = demo(tmp_path, *flags, smoke=False)
    assert again.returncode == 2
    assert "kept/store holds the store of an earlier run" in again.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--rows", "0"],
            "the number is '0'; it must be a whole number of at least 1",
        ),
        (["--rows", "many"], "argument --rows: the number is 'many'; write it as 10000000"),
        (["--dim", "7"], "argument --dim: expected an even number"),
        (["--seconds", "-1"], "argument --seconds: expected seconds above zero"),
        (["--seconds", "nan"], "argument --seconds: expected seconds above zero"),
        (["--triples", "absent.tsv"], "absent.tsv"),
        (["--triples", "bad.tsv"], "bad.tsv, line 2: expected head, relation and tail"),
        (["--triples", "one.tsv"], "too few triples"),
        (["--rows", "5", "--triples", "g.tsv"], "50 entities but the table only 5 rows"),
        (["--rows", "1e12"], "try --rows"),
        (["--directory", "g.tsv"], "g.tsv"),
    ],
)
def test_bad_flags(tmp_path: Path, monkeypatch, capsys, flags: list[str], message: str) -> None:
    family(tmp_path / "g.tsv")
    (tmp_path / "bad.tsv").write_text("a\tr\tb\nbad\n")
    (tmp_path / "one.tsv").write_text("a\tr\tb\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWMEM_SMOKE", "1")
    try:
        code = main(["demo", *flags])
    except SystemExit as exit_:  # argparse's way
        code = exit_.code
    assert code == 2
    assert message in capsys.readouterr().err
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"g.tsv", "bad.tsv", "one.tsv"}


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is another thing there")
def test_ctrl_c_while_it_trains_reports_what_was_done(tmp_path: Path) -> None:
    family(tmp_path / "g.tsv")
    line, environment = command(tmp_path, "--triples", "g.tsv", "--seconds", "600")
    with subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        heard = b""
        limit = time.monotonic() + 60
        while b"rows/s" not in heard and time.monotonic() < limit:
            heard += os.read(process.stderr.fileno(), 4096)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    text = output.decode()
    assert "Stopped by Ctrl-C: here is what was done until then." in text
    assert "trained    MRR" in text
    assert "Picture:" in text
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"demo_out", "g.tsv"}


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is another thing there")
def test_ctrl_c_while_it_reads_leaves_nothing(tmp_path: Path) -> None:
    line, environment = command(tmp_path, "--rows", "2M", "--dim", "2", smoke=False)
    with subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        heard = b""
        limit = time.monotonic() + 60
        while b"entities" not in heard and time.monotonic() < limit:
            heard += os.read(process.stderr.fileno(), 4096)
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the readers, too
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert "Stopped while reading" in output.decode()
    assert "Traceback" not in errors.decode()
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "cache"])
