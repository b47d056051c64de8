"""The planner: what it counts, what it says, and what it refuses."""

from __future__ import annotations

import json
from collections import OrderedDict
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowmem
from lowmem.cli import main
from lowmem.plan import Machine, Plan, cached_share, parse_count, plan
from lowmem.units import parse_bytes, short_bytes, short_count

BIG = Machine("big", ram=10**15, vram=10**15, disk=10**16)
GB = 10**9


# Counts as people write them.


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (10_000_000, 10**7),
        (10e6, 10**7),
        ("10M", 10**7),
        ("10e6", 10**7),
        ("10_000_000", 10**7),
        ("10,000,000", 10**7),
        (" 1.5k ", 1500),
        ("2B", 2 * 10**9),
        ("0.1M", 10**5),
        (np.int64(7), 7),
        (np.float64(7.0), 7),
    ],
)
def test_a_count_reads_as_people_write_it(written: Any, count: int) -> None:
    assert parse_count(written) == count


@pytest.mark.parametrize(
    "wrong",
    [0, -1, 1.5, "1.0001k", "10X", "", "-5", "nan", float("nan"), float("inf"), "1e400", 2**60],
)
def test_a_count_that_is_none_is_refused_with_its_value(wrong: Any) -> None:
    with pytest.raises(ValueError, match="rows is"):
        parse_count(wrong, "rows")


@pytest.mark.parametrize("wrong", [True, None, [1], 1j])
def test_a_count_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="rows is"):
        parse_count(wrong, "rows")


@given(st.integers(1, 2**48))
def test_a_short_count_never_promises_more(number: int) -> None:
    short = parse_count(short_count(number))
    assert number * 0.98 <= short <= number


def test_bytes_are_read_in_decimal_and_binary_units() -> None:
    read = [parse_bytes(text) for text in ("64GB", "64e9", "64G", "64GiB", "512")]
    assert read == [64 * GB, 64 * GB, 64 * GB, 64 << 30, 512]
    for wrong in ("", "GB", "64XB", "-1", "nan"):
        with pytest.raises(ValueError, match="ram is"):
            parse_bytes(wrong, "ram")


# What is in the page cache.


def _lru_share(rows: int, row_bytes: int, pages: int, weights: np.ndarray) -> float:
    """What a least-recently-used cache of whole pages does, played through."""
    generator = np.random.default_rng(0)
    order = generator.permutation(rows)
    ids = order[generator.choice(rows, size=150_000, p=weights / weights.sum())]
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, page in enumerate((ids * row_bytes // 4096).tolist()):
        if page in cache:
            hits += number >= 50_000
            cache.move_to_end(page)
            continue
        cache[page] = None
        if len(cache) > pages:
            cache.popitem(last=False)
    return hits / 100_000


@pytest.mark.parametrize("row_bytes", [256, 1024, 4096])
@pytest.mark.parametrize("part", [0.02, 0.2, 0.6])
@pytest.mark.parametrize("access", ["uniform", "zipf"])
def test_the_cached_share_is_that_of_a_played_cache(
    row_bytes: int, part: float, access: str
) -> None:
    rows = 20_000
    pages = int(part * rows * row_bytes / 4096)
    weights = np.arange(1, rows + 1) ** (-1.05 if access == "zipf" else 0.0)
    played = _lru_share(rows, row_bytes, pages, weights)
    assert cached_share(rows, row_bytes, pages * 4096, access) == pytest.approx(played, abs=0.02)


@given(
    rows=st.integers(1, 10**10),
    row_bytes=st.integers(1, 10**5),
    cache=st.floats(0, 1e15),
    access=st.sampled_from(["uniform", "zipf"]),
)
def test_a_share_is_a_share(rows: int, row_bytes: int, cache: float, access: str) -> None:
    share = cached_share(rows, row_bytes, cache, access)
    assert 0.0 <= share <= 1.0
    assert share <= cached_share(rows, row_bytes, cache * 2, access) + 1e-9
    if cache >= rows * row_bytes:
        assert share == 1.0


# What the optimizers hold.


def test_the_arithmetic_of_ten_million_rows() -> None:
    result = plan("10M", 128, BIG, weights="cpu")
    assert result["DSA"].bytes["ram"]["weights"] == 5_120_000_000
    assert result["DSA"].bytes["disk"]["moments"] == 10_240_000_000 + 4096
    assert result["DSA"].bytes["ram"]["moments"] == 0
    assert result["SparseAdam"].bytes["ram"]["moments"] == 10_240_000_000
    assert result["Adam"].bytes["ram"]["moments"] == 10_240_000_000
    assert result["Adam"].bytes["ram"]["gradients"] == 5_120_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_half_weights_keep_full_moments_on_disk(dtype: Any) -> None:
    result = plan(10**6, 64, BIG, dtype=dtype, weights="cpu")
    assert result["DSA"].bytes["ram"]["weights"] == 128_000_000
    assert result["DSA"].bytes["disk"]["moments"] == 512_000_000 + 4096
    assert result["SparseAdam"].bytes["ram"]["moments"] == 256_000_000
    assert result.recommended is result["DSA"]


def test_weights_in_vram_leave_no_moments_there() -> None:
    result = plan(10**6, 64, BIG, weights="cuda")
    assert result["DSA"].bytes["vram"]["moments"] == 0
    assert result["DSA"].bytes["vram"]["weights"] == 256_000_000
    assert result["DSA"].bytes["ram"]["weights"] == 0
    assert result["SparseAdam"].bytes["vram"]["moments"] == 512_000_000


@given(
    rows=st.integers(1, 10**9),
    dim=st.integers(1, 2000),
    batch=st.integers(1, 10**6),
    ram=st.integers(1, 10**12),
    disk=st.integers(0, 10**13),
)
def test_the_most_rows_fit_and_one_more_does_not(
    rows: int, dim: int, batch: int, ram: int, disk: int
) -> None:
    machine = Machine("m", ram=ram, disk=disk)
    for choice in plan(rows, dim, machine, batch=batch):
        assert choice.fits == (rows <= choice.most)
        if choice.most:
            assert plan(choice.most, dim, machine, batch=batch)[choice.name].fits
        assert not plan(choice.most + 1, dim, machine, batch=batch)[choice.name].fits


def test_what_does_not_fit_says_by_how_much() -> None:
    machine = Machine("m", ram=2 * GB, disk=1 * GB)
    result = plan(10**6, 1000, machine, batch=1)
    dsa = result["DSA"]
    assert dsa.missing == {
        "ram": dsa.total("ram") - 2 * GB,
        "disk": 8 * GB + 4096 - 1 * GB,
    }
    assert dsa.verdict.startswith("no: 2.40 GB of RAM and 7.00 GB of disk short")
    assert result.recommended is None
    assert "Nothing fits" in result.sentence


def test_a_dense_model_takes_the_share_of_a_report() -> None:
    class Row:
        def __init__(self, shape: tuple[int, ...], before: int, after: int) -> None:
            self.shape, self.bytes_before, self.bytes_after = shape, before, after

    report = [Row((1000, 100), 400_000, 4_000), Row((100,), 400, 400)]
    result = plan(parameters=100_100, machine=BIG, weights="cpu", share=report)
    assert result["AdamW"].bytes["ram"]["moments"] == 2 * 400_400
    assert result["SlimAdamW"].bytes["ram"]["moments"] == 400_400 + 4_400


def test_the_same_share_whether_a_report_counts_one_moment_or_both() -> None:
    class Row:
        shape = (10, 10)

        def __init__(self, before: int, after: int) -> None:
            self.bytes_before, self.bytes_after = before, after

    one = plan(parameters=100, machine=BIG, share=[Row(400, 40)])
    both = plan(parameters=100, machine=BIG, share=[Row(800, 440)])
    assert one["SlimAdamW"].bytes == both["SlimAdamW"].bytes


def test_auto_puts_weights_in_vram_only_where_they_fit() -> None:
    assert plan("10M", 128, "colab-t4").weights == "cuda"
    assert plan("10M", 128, "colab-cpu").weights == "cpu"
    small_gpu = Machine("m", ram=100 * GB, vram=4 * GB, disk=100 * GB)
    assert plan("10M", 128, small_gpu).weights == "cpu"
    assert plan("1M", 128, small_gpu).weights == "cuda"


def test_the_free_machines_hold_what_the_project_promises() -> None:
    result = plan("10M", 128, "colab-t4")
    assert [c.name for c in result if c.fits] == ["DSA"]
    assert result.recommended is result["DSA"]


def test_this_machine_is_measured(tmp_path: Any) -> None:
    machine = plan(1000, 8, directory=tmp_path).machine
    assert GB // 4 < machine.ram < 1 << 50
    assert 0 < machine.disk < 1 << 60
    with pytest.raises(FileNotFoundError, match="nowhere"):
        plan(1000, 8, directory=tmp_path / "nowhere")


# What it says.


ROOMY = Machine("m", ram=64 * GB, disk=500 * GB)
ROOMY_GPU = Machine("m", ram=64 * GB, vram=80 * GB, disk=500 * GB)


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        # All fit: DSA only where it is measured to be faster, and why not the simpler ones.
        ((10**6, 128, ROOMY), "DSA", ("for speed", "in RAM", "SparseAdam needs no file")),
        ((10**6, 128, ROOMY_GPU), "SparseAdam", ("neither disk", "is not measured")),
        # A long run on so large a table waits for the disk, unless few of its rows are busy.
        ((14 * 10**6, 128, ROOMY), "SparseAdam", ("needs no disk", "waits for the disk to write")),
        ((35 * 10**6, 128, ROOMY), "SparseAdam", ("Adam does not fit. Take SparseAdam",)),
        ((80 * 10**6, 128, ROOMY), "DSA", ("Take DSA: Adam and SparseAdam do not fit.",)),
        (("10M", 128, "colab-t4"), "DSA", ("waits for the disk to write: run lowmem iocheck",)),
    ],
)
def test_where_several_fit_the_advice_weighs_them(
    arguments: Any, name: str, words: tuple[str, ...]
) -> None:
    result = plan(*arguments)
    assert result.recommended is result[name]
    for said in words:
        assert said in result.sentence
    assert (name == "DSA") or "disk's speed will hardly matter" not in result.sentence


def test_half_weights_get_dsa_for_its_full_moments() -> None:
    for machine in (ROOMY, ROOMY_GPU):
        result = plan(10**6, 128, machine, dtype="bfloat16")
        assert result.recommended is result["DSA"]
        assert "SparseAdam keeps its moments in bfloat16" in result.sentence


def test_what_may_wait_is_a_part_of_the_page_cache() -> None:
    result = plan(10**6, 128, ROOMY)
    assert result.page_cache is not None
    assert 0 < result.as_dict()["may_wait_bytes"] < 0.2 * result.page_cache


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


PLANS = {
    "table": lambda: plan("10M", 128, "colab-t4"),
    "too-big": lambda: plan("1B", 512, "colab-cpu"),
    "hopeless": lambda: plan("1M", 8, Machine("tiny", ram=1000)),
    "dense": lambda: plan(parameters="124M", machine="colab-t4"),
    "odd-name": lambda: plan(1000, 8, Machine("<b>&mine", ram=10**9, disk=10**9)),
}


@pytest.mark.parametrize("kind", PLANS)
def test_text_and_html_say_the_same(kind: str) -> None:
    result: Plan = PLANS[kind]()
    text = repr(result)
    parser = _Text()
    parser.feed(result._repr_html_())
    assert not parser.open
    html = " ".join(parser.texts)
    for choice in result:
        for shown in (choice.name, choice.verdict, short_count(choice.most)):
            assert shown in text
            assert shown in html
        for resource in result.resources:
            assert short_bytes(choice.total(resource)) in text
    assert result.sentence in text
    assert result.sentence in html
    assert max(map(len, text.splitlines())) < 250


@pytest.mark.parametrize("kind", PLANS)
def test_the_bars_are_the_figures(kind: str) -> None:
    result: Plan = PLANS[kind]()
    figure = result.figure()
    assert len(figure.axes) == len(result.resources)
    for ax, resource in zip(figure.axes, result.resources, strict=True):
        drawn = sum(bar.get_width() for bar in ax.patches)
        assert drawn == pytest.approx(sum(c.total(resource) for c in result))
        limit = ax.lines[0].get_xdata()
        assert list(limit) == [result.machine.limit(resource)] * 2
    hatches = {bar.get_hatch() for ax in figure.axes for bar in ax.patches}
    assert len(hatches) > 1 or len({b.get_facecolor() for b in figure.axes[0].patches}) == 1
    figure.canvas.draw()
    assert all(choice.name in result.alt for choice in result)


def test_json_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rows", "10e6", "--dim", "128", "--machine", "colab-t4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"] == 10**7
    assert data["recommended"] == "DSA"
    dsa = next(c for c in data["choices"] if c["name"] == "DSA")
    assert dsa["total_bytes"]["disk"] == 10_240_004_096
    assert data["cached_share"].keys() == {"uniform", "zipf"}


# What runs.


@pytest.mark.parametrize("which", ["Adam", "SparseAdam", "DSA", "SlimAdamW", "AdamW", "largest"])
def test_the_code_runs_when_pasted(
    which: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, dim = 3000, 16
    machines = {
        # Room for exactly one choice makes it the recommended one.
        "DSA": Machine("m", ram=10**9, disk=10**9),
        "SparseAdam": Machine("m", ram=10**9),
        "largest": Machine("m", ram=10**9, disk=100_000),
    }
    if which in ("AdamW", "SlimAdamW"):
        machine = Machine("m", ram=10**10)
        result = plan(parameters=10**6, machine=machine, share=1.0 if which == "AdamW" else None)
        if which == "AdamW":
            object.__setattr__(result, "recommended", result["AdamW"])
    elif which == "Adam":
        result = plan(rows, dim, Machine("m", ram=10**9), batch=32)
        object.__setattr__(result, "recommended", result["Adam"])
    else:
        result = plan(rows, dim, machines[which], batch=32)
    if which == "largest":
        object.__setattr__(result, "recommended", None)
        assert result["SparseAdam"].fits
        assert "rows = " in result.code
    else:
        assert result.recommended is not None
        assert result.recommended.name == which
        assert which in result.code
    scope: dict[str, Any] = {}
    exec(compile(result.code, "pasted", "exec"), scope)
    assert torch.isfinite(scope["loss"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--code"], []])
def test_code_for_fewer_rows_than_asked_says_so_before_anything_else(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--ram", "4GB", "--disk", "8GB"]
    assert main(["plan", "--rows", "1e9", "--dim", "128", *machine, *arguments]) == 0
    text = capsys.readouterr().out
    result = plan("1e9", 128, Machine("yours", ram=4 * GB, disk=8 * GB))
    assert result.recommended is None
    most = max(choice.most for choice in result)
    comment, _, code = text[text.index("# ") :].partition("import torch")
    assert comment.count("# ") == 3
    for words in ("1,000,000,000 rows do not fit", f"FOR {most:,} ROWS", "of disk short"):
        assert words in comment
    assert f"rows = {most:_}  # NOT 1_000_000_000" in code
    assert arguments or "The code, but not for what you asked" in text


def test_code_for_fewer_parameters_than_asked_says_so_too() -> None:
    result = plan(parameters="100B", machine=Machine("m", ram=4 * GB))
    assert result.code.startswith("# 100,000,000,000 parameters do not fit on m")
    assert f"# The most that fit: {result['SlimAdamW'].most:,}." in result.code
    exec(compile(result.code, "pasted", "exec"), {})


def test_code_where_nothing_fits_at_all_is_a_comment() -> None:
    code = plan("1M", 8, Machine("tiny", ram=1000)).code
    assert code.startswith("# Nothing fits")
    exec(code)


# What it refuses.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "rows and dim of a table, or parameters"),
        ({"rows": 10}, "rows and dim; they are 10 and None"),
        ({"rows": 10, "dim": 2, "parameters": 5}, "rows and dim of a table, or parameters"),
        ({"rows": 10, "dim": 0}, "dim is 0"),
        ({"rows": 10, "dim": 2, "batch": 0}, "batch is 0"),
        ({"rows": 10, "dim": "100M"}, "dim is 100,000,000"),
        ({"rows": 10, "dim": 2, "dtype": "int8"}, "dtype is 'int8'.*bfloat16"),
        ({"rows": 10, "dim": 2, "weights": "tpu"}, "weights is 'tpu'.*cuda"),
        ({"rows": 10, "dim": 2, "weights": "cuda", "machine": "colab-cpu"}, "has no VRAM"),
        ({"rows": 10, "dim": 2, "machine": "colab"}, "machine is 'colab'.*colab-t4"),
        ({"rows": 10, "dim": 2, "share": 0.5}, "share belongs to a dense model"),
        ({"parameters": 10, "share": 1.5}, "share is 1.5"),
        ({"parameters": 10, "share": float("nan")}, "share is nan"),
    ],
)
def test_bad_input_is_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lowmem.plan(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": 10, "dim": 2, "machine": 5},
        {"parameters": 10, "share": "half"},
        {"parameters": 10, "share": []},
        {"parameters": 10, "share": True},
    ],
)
def test_a_wrong_type_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=" is "):
        lowmem.plan(**arguments)


@pytest.mark.parametrize("sizes", [{"ram": 0}, {"ram": -1}, {"ram": 1, "disk": float("inf")}])
def test_a_machine_without_sense_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        Machine("m", **sizes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "10X", "--dim", "8"], "rows is '10X'"),
        (["--rows", "10", "--dim", "8", "--machine", "this", "--ram", "1GB"], "not both"),
        (["--rows", "10", "--dim", "8", "--disk", "1GB"], "needs --ram"),
        (["--rows", "10", "--dim", "8", "--ram", "lots"], "--ram is 'lots'"),
        (["--rows", "10", "--dim", "8", "--plot", "picture.xyz"], "picture.xyz"),
        (["--rows", "10", "--dim", "8", "--plot", "/nowhere/p.png"], "/nowhere"),
        ([], "rows and dim"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_command_draws(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", "--rows", "1k", "--dim", "8", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "import torch" in capsys.readouterr().out
