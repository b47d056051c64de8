"""The commit benchmark: what it touches is what the journal holds, and a crash comes back."""

import sys

import pytest

from lowmem.bench import commit as bench

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")


def test_figures_of_a_small_table(tmp_path):
    (row,) = bench.commit(tmp_path, rows=2000, dim=4, repeats=2, shares=(0.05,))
    assert row["regime"] == "commit"
    assert row["contender"] == "DSA, 5 % touched"
    assert row["touched_rows"] == 100
    assert row["journal_bytes"] == 128 + 100 * (16 + 2 * 4 * 4)
    assert len(row["commits_s"]) == 2
    assert 0 < row["commit_s"] == pytest.approx(100 * row["commit_row_s"])
    assert 0 < row["resume_s"] == pytest.approx(100 * row["resume_row_s"])


def test_a_child_that_does_not_get_to_its_end_is_an_error(tmp_path):
    with pytest.raises(OSError, match=r"the child that trains failed, see above \(status 1\)"):
        bench._train_and_die(tmp_path / "s", rows=10, dim=4, touched=11, repeats=1)
