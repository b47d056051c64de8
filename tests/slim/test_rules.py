"""From SNR records to rules: the published selection, exactly; and what is refused."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem import SlimAdamW, SNRTracker, derive_rules
from lowmem.cli import main
from lowmem.slim.plots import draw_snr, layer_and_depth
from lowmem.slim.records import PartKey, Record, format_records, header, read_records
from lowmem.slim.rules import choose
from lowmem.slim.rulesfile import read_rules

HEADER = "step,key,shape,compress_dims,snr,mean_sqr,var\n"
SETS = ["(0,)", "(1,)", "(0, 1)"]


def published_rules(text: str, cutoff: float) -> dict[str, list[int] | None]:
    """The published selection, told again from its description, on the text of the CSV."""
    series: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(io.StringIO(text)):
        series[row["key"]][row["compress_dims"]].append(float(row["snr"]))
    rules: dict[str, list[int] | None] = {}
    for key, sets in series.items():
        means = {axes: statistics.fmean(sets[axes]) for axes in sorted(sets)}
        passed = {axes: mean for axes, mean in means.items() if mean > cutoff}
        best = max(passed, key=lambda axes: passed[axes], default=None)
        if best is None or "ln_" in key:
            rules[key] = None
        else:
            rules[key] = [int(axis) for axis in best.strip("()").split(",") if axis.strip()]
    return rules


def table(rows: list[str]) -> str:
    return HEADER + "".join(row + "\n" for row in rows)


def write(tmp_path, text, name="snr.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_published_selection(data):
    steps = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True))
    keys = ["transformer.wte.weight", "transformer.h.0.ln_1.weight", "h.10.attn.q_proj.weight"]
    ratios = st.one_of(
        st.floats(0, 3, allow_nan=False), st.sampled_from([1.0, 2.0, 1e-30, 1e9, math.inf])
    )
    rows = []
    for step in sorted(steps):
        for key in keys:
            shape, sets = ('"(768,)"', SETS[:1]) if "ln_" in key else ('"(50304, 768)"', SETS)
            for axes in sets:
                rows.append(f'{step},{key},{shape},"{axes}",{data.draw(ratios)!r},1e-20,1e-20')
    text = table(rows)
    cutoff = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    records = list(csv.DictReader(io.StringIO(text)))
    assert derive_rules(records, cutoff=cutoff) == published_rules(text, cutoff)


def test_strictly_above_the_cutoff():
    def rules(snr):
        return derive_rules([Record(1, "w", (4, 6), (1,), snr, 1.0, 1.0)])["w"]

    assert rules(1.0) is None
    assert rules(math.nextafter(1.0, 2)) == [1]


def test_the_mean_is_plain_and_each_set_has_its_own_steps():
    records = [
        Record(1, "w", (4, 6), (0,), 0.1),
        Record(100, "w", (4, 6), (0,), 2.1),
        Record(200, "w", (4, 6), (0,), 1.4),
        Record(1, "w", (4, 6), (1,), 1.15),
    ]
    (choice,) = choose(records)
    assert choice.snr == {(0,): pytest.approx(1.2), (1,): 1.15}
    assert choice.axes == (0,)
    assert derive_rules(records, burn_in=2) == {"w": [0]}
    assert derive_rules(records[:1] + records[3:], burn_in=1) == {"w": [1]}


def test_prefer_bytes_takes_what_saves_most():
    records = [
        Record(1, "w", (4, 6), (0,), 3.0),
        Record(1, "w", (4, 6), (1,), 2.0),
        Record(1, "w", (4, 6), (0, 1), 0.9),
    ]
    assert derive_rules(records) == {"w": [0]}
    assert derive_rules(records, prefer="bytes") == {"w": [1]}
    assert derive_rules(records, prefer="bytes", cutoff=0.5) == {"w": [0, 1]}
    (choice,) = choose(records, prefer="bytes")
    assert (choice.bytes_before, choice.bytes_after) == (96, 16)


def test_vectors_are_never_averaged_and_sets_that_save_nothing_are_no_choice():
    records = [
        Record(1, "norm.weight", (8,), (0,), 50.0),
        Record(1, "narrow", (8, 1), (1,), math.inf),
        Record(1, "narrow", (8, 1), (0,), 2.0),
    ]
    assert derive_rules(records) == {"norm.weight": None, "narrow": [0]}


def test_infinite_counts_and_all_zero_does_not():
    records = [
        Record(1, "w", (4, 6), (1,), 0.0, 0.0, 0.0),  # all zero: unknown
        Record(2, "w", (4, 6), (1,), 1.5, 1.0, 1.0),
        Record(2, "w", (4, 6), (0,), math.inf, 1.0, 0.0),
        Record(1, "dead", (4, 6), (1,), 0.0, 0.0, 0.0),
        Record(1, "other", (4, 6), (1,), math.nan, 1.0, 0.0),  # as the published code says it
    ]
    assert derive_rules(records) == {"w": [0], "dead": None, "other": None}
    assert next(c for c in choose(records) if c.key == "w").snr[1,] == 1.5


def test_parts_become_one_rule_of_the_parameter(tmp_path):
    def part(index, label, axes, snr=2.0, repeat=1):
        key = PartKey("attn.qkv.weight", label, index, 3, 0, 4, repeat)
        return Record(1, str(key), (4 * repeat, 8), axes, snr)

    split = [part(0, "query", (1,)), part(1, "key", (1,), 0.5), part(2, "value", (0,))]
    path = write(tmp_path, header() + format_records(split))
    expected = {
        "split": 0,
        "parts": [
            {"size": 4, "axes": [1], "name": "query"},
            {"size": 4, "axes": None, "name": "key"},
            {"size": 4, "axes": [0], "name": "value"},
        ],
    }
    assert derive_rules(path) == derive_rules(split) == {"attn.qkv.weight": expected}
    same = [part(i, str(i), (1,)) for i in range(3)]
    assert derive_rules(same) == {"attn.qkv.weight": [1]}
    none = [part(i, str(i), (1,), 0.5) for i in range(3)]
    assert derive_rules(none) == {"attn.qkv.weight": None}
    heads = [part(i, "qkv"[i], (0,), repeat=2) for i in range(3)]
    assert derive_rules(heads)["attn.qkv.weight"]["repeat"] == 2
    assert choose(heads)[0].bytes_after == 2 * 8 * 4  # a mean for each of the two heads
    with pytest.raises(ValueError, match=r"attn.qkv.weight.*part 1 of 3"):
        derive_rules([split[0], split[2]])
    with pytest.raises(ValueError, match="whole and in parts"):
        derive_rules([*split, Record(1, "attn.qkv.weight", (12, 8), (1,), 2.0)])


@given(
    st.text("abc.[]01 axis size", min_size=1, max_size=20),
    st.text("qkv-é ", max_size=6),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(1, 10**6),
    st.integers(1, 40),
)
def test_part_keys_round_trip(name, label, index, axis, size, repeat):
    key = PartKey(name, label, index, index + 1, axis, size, repeat)
    assert PartKey.parse(str(key)) == key


def test_ordinary_names_are_no_parts():
    for key in (
        "h.0.attn.c_attn.weight",
        "w[0]",
        "w[q 3/3 axis 0 size 4]",
        "[q 0/1 axis 0 size 4]",
    ):
        assert PartKey.parse(key) is None


VARIANTS = {
    "as published": table(['1,w,"(4, 6)","(1,)",2.5,1e-20,4e-21']),
    "crlf": table(['1,w,"(4, 6)","(1,)",2.5,1e-20,4e-21']).replace("\n", "\r\n"),
    "byte order mark": b"\xef\xbb\xbf" + table(['1,w,"(4, 6)","(1,)",2.5,1,1']).encode(),
    "no newline at the end": table(['1,w,"(4, 6)","(1,)",2.5,1e-20,4e-21']).rstrip("\n"),
    "spaces": 'step, key ,shape, compress_dims,snr,mean_sqr,var\n1, w, "(4,6)", "( 1, )", 2.5, 1,1',
    "other order": 'snr,var,key,compress_dims,step,shape,mean_sqr\n2.5,1,w,"(1,)",1,"(4, 6)",1\n',
    "more columns": ',step,key,shape,compress_dims,snr,lr\n0,1,w,"(4, 6)","(1,)",2.5,x\n',
    "lists": table(['1,w,"[4, 6]","[1]",2.5,1,1']),
    "bare": table(['1,w,"4, 6",1,2.5,1,1']),
    "torch.Size": table(['1,w,"torch.Size([4, 6])",(1),2.5,1,1']),
    "negative axis": table(['1,w,"(4, 6)","(-1,)",2.5,1,1']),
    "step as a float": table(['1.0,w,"(4, 6)","(1,)",2.5,1,1']),
    "blank lines": "\n" + table(['1,w,"(4, 6)","(1,)",2.5,1,1', "", ""]),
    "quotes everywhere": table(['"1","w","(4, 6)","(1,)","2.5","1","1"']),
}


@pytest.mark.parametrize("text", VARIANTS.values(), ids=VARIANTS)
def test_files_from_elsewhere(text, tmp_path):
    (record,) = read_records(write(tmp_path, text))
    assert record[:5] == (1, "w", (4, 6), (1,), 2.5)


def test_numbers_of_every_form(tmp_path):
    rows = [
        f'{step},w,"(4, 6)","(1,)",{text},1,0'
        for step, text in enumerate(["inf", "Infinity", "1e300", "5E-324", "nan", "", "0", ".5"])
    ]
    found = [record.snr for record in read_records(write(tmp_path, table(rows)))]
    assert found[:4] == [math.inf, math.inf, 1e300, 5e-324]
    assert all(math.isnan(x) for x in found[4:6])
    assert found[6:] == [0.0, 0.5]


GOOD = '1,w,"(4, 6)","(1,)",2.5,1,1'
MALFORMED = {
    "not a number": ([GOOD, '2,w,"(4, 6)","(1,)",two,1,1'], "line 3.*snr.*'two'"),
    "code": (
        [GOOD, '2,w,"(4, 6)","(__import__(\'os\').getcwd(),)",2,1,1'],
        "line 3.*compress_dims",
    ),
    "code as shape": ([GOOD, '2,w,"[4 for _ in (1,)]","(1,)",2,1,1'], "line 3.*shape"),
    "underscores": ([GOOD, '2,w,"(4, 6)","(1,)",1_0,1,1'], "line 3.*snr"),
    "negative": ([GOOD, '2,w,"(4, 6)","(1,)",-2.5,1,1'], "line 3.*negative"),
    "unknown axis": ([GOOD, '2,w,"(4, 6)","(2,)",2.5,1,1'], "line 3.*axis 2 of 'w'"),
    "axis twice": ([GOOD, '2,w,"(4, 6)","(1, -1)",2.5,1,1'], "line 3.*twice"),
    "no axis": ([GOOD, '2,w,"(4, 6)","()",2.5,1,1'], "line 3.*no axis"),
    "no key": ([GOOD, '2,,"(4, 6)","(1,)",2.5,1,1'], "line 3.*key"),
    "step": ([GOOD, 'x,w,"(4, 6)","(1,)",2.5,1,1'], "line 3.*step.*'x'"),
    "half a step": ([GOOD, '1.5,w,"(4, 6)","(1,)",2.5,1,1'], "line 3.*step"),
    "short": ([GOOD, "2,w"], "line 3.*shape"),
    "open quote": ([GOOD, '2,w,"(4, 6)', GOOD], "line 3.*not CSV"),
    "twice": ([GOOD, '2,w,"(4, 6)","(1,)",2.5,1,1', GOOD], "line 4.*'w'.*line 2"),
    "huge integer": ([GOOD, f'2,w,"({"9" * 5000}, 6)","(1,)",2.5,1,1'], "line 3.*shape"),
    "size 0": ([GOOD, '2,w,"(0, 6)","(1,)",2.5,1,1'], "line 3.*shape"),
    "too long": ([GOOD, "x" * 100_000], "line 3"),
    "bytes": ([GOOD, "\x00\x01\x02"], "line 3"),
}


@pytest.mark.parametrize(("rows", "said"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_names_the_line(rows, said, tmp_path, capsys):
    path = write(tmp_path, table(rows))
    with pytest.raises(ValueError, match=rf"(?s)snr.csv, {said}"):
        read_records(path)
    assert main(["rules", "--snr_filename", str(path), "--out", str(tmp_path / "r.json")]) == 2
    assert f"line {4 if 'line 4' in said else 3}" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no SNR records"),
        (HEADER, "no SNR records"),
        ("a,b\n1,2\n", "line 1: no column step, key, shape"),
        (HEADER.replace("snr", "ratio"), "no column snr"),
        ("step,step,key,shape,compress_dims,snr\n", "step stands there twice"),
        ('{\n"w": [1]\n}\n', "JSON, perhaps a rules file"),
        (b"\x93NUMPY\x01\x00 v\n", "line 1"),
    ],
)
def test_a_file_of_another_kind(text, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read_records(write(tmp_path, text))


def test_records_that_contradict_name_the_layer():
    good = Record(1, "a.weight", (4, 6), (1,), 2.0, 1.0, 1.0)
    for bad, said in (
        (good._replace(step=2, snr=math.nan), r"'a.weight'.*step 2 is not a number"),
        (good._replace(step=2, shape=(5, 6)), r"'a.weight'.*two models"),
        (good._replace(snr=3.0), r"'a.weight'.*twice"),
        (good._replace(step=2, compress_dims=(3,)), r"record 1: axis 3 of 'a.weight' is unknown"),
    ):
        with pytest.raises(ValueError, match=said):
            derive_rules([good, bad])


def test_arguments_are_checked(tmp_path):
    good = [Record(1, "w", (4, 6), (1,), 2.0)]
    for options, said in (
        ({"cutoff": math.nan}, "cutoff"),
        ({"cutoff": -1}, "cutoff"),
        ({"prefer": "speed"}, "speed"),
        ({"burn_in": 5}, "from step 5 on"),
    ):
        with pytest.raises(ValueError, match=said):
            derive_rules(good, **options)
    with pytest.raises(ValueError, match="no SNR records"):
        derive_rules([])
    with pytest.raises(TypeError, match="int"):
        derive_rules(3)
    with pytest.raises(TypeError, match="record 0"):
        derive_rules([("w", 1)])
    with pytest.raises(ValueError, match="record 0 lacks step, shape"):
        derive_rules([{"key": "w", "compress_dims": "(0,)", "snr": 1}])
    with pytest.raises(FileNotFoundError):
        derive_rules(tmp_path / "none.csv")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_a_clear_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_bytes(HEADER.encode() + data)
    try:
        derive_rules(read_records(path))
    except ValueError as error:
        if not any(word in str(error) for word in ("line", "layer", "no SNR records")):
            raise AssertionError(f"an error that names nothing: {error}") from error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from lowmem.demo.gpt import GPT, python_text, train

    model = GPT(layers=3, width=16, context=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tracker = SNRTracker(early_freq=3, save_dir=tmp_path_factory.mktemp("snr"))

    def on_step(step, loss):
        if tracker.should_measure(step):
            tracker.measure_and_save(model=model, optimizer=optimizer, step=step)

    train(model, optimizer, python_text(0.2)[0], 12, on_step=on_step)
    return model, tracker, tracker.save_all_results("run.csv")


def test_the_command_from_records_to_a_running_optimizer(trained, tmp_path, capsys):
    model, tracker, path = trained
    out, plot = tmp_path / "rules" / "slimadam.json", tmp_path / "snr.png"
    command = ["rules", "--snr_filename", str(path), "--cutoff", "0.6", "--out", str(out)]
    assert main([*command, "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    rules = tracker.rules(cutoff=0.6)
    assert json.loads(out.read_text()) == rules
    assert list(rules) == [name for name, _ in model.named_parameters()]
    optimizer = SlimAdamW(model.named_parameters(), rules_json_path=out)
    report = optimizer.report()
    saved = report.bytes_before - report.bytes_after
    assert saved > 0
    assert f"{saved:,} of {report.bytes_before:,} bytes saved" in said
    assert read_rules(out).keys() == rules.keys()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_to_the_published_place(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["rules", "--snr_filename", str(trained[2]), "--prefer", "bytes"]) == 0
    assert json.loads((tmp_path / "rules" / "slimadam.json").read_text()) == derive_rules(
        trained[2], prefer="bytes"
    )


def test_the_picture_shows_every_layer_type_and_the_cutoff(trained):
    _, tracker, _ = trained
    figure = draw_snr(tracker.records, cutoff=0.7)
    (legend,) = figure.legends
    kinds = {text.get_text() for text in legend.get_texts()}
    assert {"tok_emb", "pos_emb", "lm_head", "attn.q_proj", "mlp.down_proj"} <= kinds
    assert not any("ln_1" in kind or "bias" in kind for kind in kinds)
    assert len(figure.axes) == 6  # three axis sets, over depth and over steps
    for axes in figure.axes:
        assert any(list(line.get_ydata()) == [0.7, 0.7] for line in axes.lines)
    queries = [
        statistics.fmean(
            r.snr
            for r in tracker.records
            if r.key == f"blocks.{depth}.attn.q_proj.weight" and r.compress_dims == (0,)
        )
        for depth in range(3)
    ]
    drawn = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert any(line == pytest.approx(queries) for line in drawn)


def test_the_picture_stands_nothing_and_infinities():
    assert draw_snr([]).axes
    draw_snr([Record(1, "w", (4, 6), (1,), math.inf), Record(1, "b", (4,), (0,), 1.0)])


def test_layer_types():
    assert layer_and_depth("transformer.h.11.mlp.c_fc.weight") == ("mlp.c_fc", 11)
    assert layer_and_depth("transformer.wte.weight") == ("wte", None)
    assert layer_and_depth("layers.2.experts.5.up.weight") == ("experts.#.up", 2)
    part = PartKey("h.4.attn.c_attn.weight", "query", 0, 3, 1, 768)
    assert layer_and_depth(str(part)) == ("attn.c_attn query", 4)


def test_biases_of_two_dimensions_get_no_rule():
    keys = ("experts.down_proj_bias", "experts.bias", "experts.gate_up_proj_bias", "lin.bias")
    records = [Record(1, key, (4, 6), (1,), 9.0) for key in keys]
    assert derive_rules(records) == dict.fromkeys(keys)
    weight = [Record(1, "relative_attention_bias.weight", (4, 6), (1,), 9.0)]
    assert derive_rules(weight) == {"relative_attention_bias.weight": [1]}


def test_huge_ratios_have_a_mean():
    huge = [Record(step, "w", (4, 6), axes, 1.7e308) for step in (1, 2, 3) for axes in ((0,), (1,))]
    more = Record(4, "w", (4, 6), (1,), math.inf)
    assert derive_rules(huge)["w"] == [0]
    assert derive_rules([*huge, more])["w"] == [1]
    assert choose(huge)[0].snr[(0,)] == pytest.approx(1.7e308)


@pytest.mark.parametrize(
    "bad",
    [
        {"snr": None},
        {"snr": -math.inf},
        {"snr": -1.0},
        {"snr": "much"},
        {"compress_dims": (1, 1)},
        {"compress_dims": (2,)},
        {"compress_dims": ()},
        {"compress_dims": None},
        {"shape": (4, 0)},
        {"shape": 4},
        {"step": -1},
        {"step": 10**19},
        {"step": None},
        {"key": ""},
    ],
)
def test_records_made_by_hand_are_checked_as_those_of_files_are(bad):
    good = Record(1, "w", (4, 6), (1,), 2.0)
    with pytest.raises(ValueError, match="SNR record 1"):
        derive_rules([good, good._replace(step=2)._replace(**bad)])


def test_records_made_by_hand_may_have_numpys_numbers_and_lists():
    odd = Record(np.int64(1), "w", [np.int64(4), 6], [np.int64(-1)], np.float32(2))
    assert derive_rules([odd]) == {"w": [1]}
    assert derive_rules([Record(1, "w", (4, 6), (1,), 2)]) == {"w": [1]}


def test_the_command_overwrites_neither_its_input_nor_its_own_output(trained, tmp_path, capsys):
    path = tmp_path / "snr.csv"
    path.write_bytes(trained[2].read_bytes())
    link = tmp_path / "link.csv"
    link.symlink_to(path)
    out = tmp_path / "rules.json"
    for options, said in (
        (["--out", str(path)], "--out would overwrite the file of --snr_filename"),
        (["--out", str(link)], "--out would overwrite the file of --snr_filename"),
        (["--out", str(out), "--plot", str(path)], "--plot would overwrite"),
        (["--out", str(out), "--plot", str(out)], "--plot would overwrite the file of --out"),
        (["--out", "."], "--out '.' is a directory"),
        (["--out", str(tmp_path)], "is a directory; give the name of a file"),
        (["--out", str(out), "--plot", str(tmp_path)], "--plot .* is a directory"),
    ):
        assert main(["rules", "--snr_filename", str(path), *options]) != 0
        assert re.search(said, capsys.readouterr().err)
        assert path.read_bytes() == trained[2].read_bytes()
        assert not out.exists()


def test_the_command_overwrites_rules_only_when_told_to(trained, tmp_path, capsys):
    out = tmp_path / "rules.json"
    out.write_text("tuned by hand")
    command = ["rules", "--snr_filename", str(trained[2]), "--out", str(out)]
    assert main(command) == 2
    assert re.search(rf"{re.escape(str(out))} is there already.*--force", capsys.readouterr().err)
    assert out.read_text() == "tuned by hand"
    assert main([*command, "--force"]) == 0
    assert json.loads(out.read_text()) == derive_rules(trained[2])


def test_a_folder_of_one_file_of_records_stands_for_it(trained, tmp_path, capsys):
    folder, out = tmp_path / "snr_data", tmp_path / "rules.json"
    folder.mkdir()
    command = ["rules", "--snr_filename", str(folder), "--out", str(out)]
    assert main(command) == 2
    assert "without a .csv file" in capsys.readouterr().err
    (folder / "snr_1.csv").write_bytes(trained[2].read_bytes())
    (folder / "notes.txt").write_text("no records")
    assert main([*command, "--out", str(folder / "snr_1.csv"), "--force"]) == 2
    assert "would overwrite the file of --snr_filename" in capsys.readouterr().err
    assert main(command) == 0
    assert f"records: {folder / 'snr_1.csv'}" in capsys.readouterr().out
    assert json.loads(out.read_text()) == derive_rules(trained[2])
    (folder / "snr_2.csv").write_bytes(trained[2].read_bytes())
    assert main([*command, "--force"]) == 2
    said = capsys.readouterr().err
    assert all(str(folder / name) in said for name in ("snr_1.csv", "snr_2.csv"))
    assert "notes.txt" not in said


def test_a_name_with_dollars_is_drawn_as_it_is():
    figure = draw_snr([Record(1, r"a.$\\frac$", (4, 6), (1,), 2.0)])
    figure.savefig(io.BytesIO(), format="png")
