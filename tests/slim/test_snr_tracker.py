"""SNRTracker: when it measures, what it reads, and that nothing measured is lost."""

from __future__ import annotations

import copy
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from lowmem import DSA, SlimAdamW, SNRTracker, snr
from lowmem.slim.records import COLUMNS, PartKey, read_records


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 3, bias=False)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def stepped(model, optimizer, steps=1, shape=(4, 6)):
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(shape)).square().sum().backward()
        optimizer.step()
    return optimizer


def measured(model, optimizer, tmp_path, **options):
    tracker = SNRTracker(save_dir=tmp_path, **options)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=1)
    return tracker


def test_the_published_schedule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = SNRTracker()
    assert (tmp_path / "snr_data").is_dir()
    steps = [step for step in range(1, 3500) if tracker.should_measure(step)]
    assert steps == [1, *range(100, 1000, 100), 1000, 2000, 3000]


def test_the_published_constructor(tmp_path):
    tracker = SNRTracker(5, 10, 50, 100, tmp_path / "deep" / "snr")
    steps = [step for step in range(210) if tracker.should_measure(step)]
    assert steps == [5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 150, 200]
    assert (tmp_path / "deep" / "snr").is_dir()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, foreach=False),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: SlimAdamW(p),
    ],
    ids=["Adam", "foreach", "fused", "amsgrad", "NAdam", "RAdam", "SlimAdamW"],
)
def test_reads_any_adam(make, tmp_path):
    model = Net()
    optimizer = stepped(model, make(model.parameters()))
    tracker = measured(model, optimizer, tmp_path)
    expected = {}
    for name, param in model.named_parameters():
        v = optimizer.state[param]["exp_avg_sq"]
        for axes in [(0,)] if v.dim() == 1 else [(0,), (1,), (0, 1)]:
            expected[name, axes] = (tuple(v.shape), snr(v, axes))
    found = {(r.key, r.compress_dims): (r.shape, r.snr) for r in tracker.records}
    assert found.keys() == expected.keys()
    for key, (shape, ratio) in found.items():
        assert (shape, pytest.approx(ratio, rel=1e-12)) == expected[key]
    assert {r.step for r in tracker.records} == {1}


def test_reads_the_dense_part_of_dsa(tmp_path):
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3))
    with DSA(model.parameters(), directory=tmp_path / "store") as optimizer:
        model(torch.tensor([1, 2, 3])).sum().backward()
        optimizer.step()
        tracker = measured(model, optimizer, tmp_path)
    assert {r.key for r in tracker.records} == {"1.weight", "1.bias"}


def test_reads_the_published_optimizers_state(tmp_path):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nu = torch.rand(4, 3)
    optimizer.state[model.weight] = {"step": 1, "mu": torch.zeros(4, 3), "nu": nu}
    tracker = measured(model, optimizer, tmp_path)
    assert [r.snr for r in tracker.records] == [snr(nu, a) for a in [(0,), (1,), (0, 1)]]


def test_parameters_without_a_state_are_skipped(tmp_path):
    model = Net()
    model.down.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    tracker = measured(model, stepped(model, optimizer), tmp_path)
    assert "down.weight" not in {r.key for r in tracker.records}


def test_names_are_without_the_compilers_prefix(tmp_path):
    model = Net()
    compiled = nn.ModuleDict({"_orig_mod": model})  # what torch.compile's wrapper looks like
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    tracker = measured(compiled, optimizer, tmp_path)
    assert {r.key for r in tracker.records} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_convolutions_get_the_meaningful_sets(conv, tmp_path):
    model = conv(3, 5, 3)
    dims = model.weight.dim()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, shape=(2, 3, *(5,) * (dims - 2)))
    tracker = measured(model, optimizer, tmp_path)
    area = tuple(range(2, dims))
    found = {r.compress_dims: r.snr for r in tracker.records if r.key == "weight"}
    out = 1 if conv is nn.ConvTranspose2d else 0
    assert set(found) == {(out,), (1, *area), (0, *area), area, (0, 1, *area)}
    v = optimizer.state[model.weight]["exp_avg_sq"]
    assert found == pytest.approx({axes: snr(v, axes) for axes in found}, rel=1e-12)
    everything = measured(model, optimizer, tmp_path, all_axes=True)
    assert sum(r.key == "weight" for r in everything.records) == 2**dims - 1


def test_experts_and_position_tables_are_stacks_of_matrices(tmp_path):
    model = nn.ParameterDict({"experts": torch.rand(4, 5, 6), "position": torch.rand(1, 7, 8)})
    optimizer = torch.optim.AdamW(model.parameters())
    (model["experts"].square().sum() + model["position"].square().sum()).backward()
    optimizer.step()
    tracker = measured(model, optimizer, tmp_path)
    for key in ("experts", "position"):
        assert {r.compress_dims for r in tracker.records if r.key == key} == {(1,), (2,), (1, 2)}


def test_a_fused_projection_is_measured_part_by_part(tmp_path):
    model = nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(5, 3, 8)
    model(x, x, x)[0].square().sum().backward()
    optimizer.step()
    tracker = measured(model, optimizer, tmp_path)
    v = optimizer.state[model.in_proj_weight]["exp_avg_sq"]
    keys = {r.key for r in tracker.records if r.key.startswith("in_proj_weight")}
    parts = sorted((PartKey.parse(key) for key in keys), key=lambda part: part.index)
    assert [part.label for part in parts] == ["query", "key", "value"]
    for part, own in zip(parts, v.chunk(3), strict=True):
        found = {r.compress_dims: r.snr for r in tracker.records if r.key == str(part)}
        assert found == pytest.approx({axes: snr(own, axes) for axes in [(0,), (1,), (0, 1)]})
    assert read_records(tracker.path) == tracker.records
    SlimAdamW(model.named_parameters(), rules=tracker.rules(cutoff=0.3), model=model)


def test_heads_that_alternate_are_measured_head_by_head(tmp_path):
    """Query, key and value come head by head: every head's rows have a mean of their own."""
    from lowmem.slim.rulesfile import Part, Split
    from lowmem.slim.second_moments import second_moments

    model = nn.Linear(6, 24, bias=False)
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    split = Split(0, tuple(Part(4, (1,), name) for name in ("query", "key", "value")), repeat=2)
    moments, _ = second_moments(model, optimizer, {id(model.weight): split})
    v = optimizer.state[model.weight]["exp_avg_sq"]
    tracker = SNRTracker(save_dir=tmp_path)
    records = {(r.key, r.compress_dims): r for r in tracker._measure(moments, 1)}
    key = next(key for key, _ in records if "[key" in key)
    heads = torch.stack([v[4:8], v[16:20]])
    assert records[key, (0,)].snr == pytest.approx(snr(heads, 1))
    assert records[key, (1,)].snr == pytest.approx(snr(heads, 2))
    assert records[key, (0, 1)].snr == pytest.approx(snr(heads, (1, 2)))
    assert records[key, (0,)].shape == (8, 6)


def test_means_are_not_measured_and_named_once(tmp_path, caplog):
    """Means are equal along their own axes whatever the gradients were: that is no SNR."""
    model = Net()
    rules = {"up.weight": [1], "down.weight": [0, 1]}
    optimizer = stepped(model, SlimAdamW(model.named_parameters(), rules=rules))
    tracker = SNRTracker(save_dir=tmp_path)
    for step in (1, 2):
        tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
    whole = {"up.bias", "norm.weight", "norm.bias"}
    assert {r.key for r in tracker.records} == set(tracker.rules()) == whole
    assert all(math.isfinite(r.snr) for r in tracker.records)
    [said] = [r.getMessage() for r in caplog.records if "averaged already" in r.getMessage()]
    assert "up.weight, down.weight" in said
    assert "AdamW, or of SlimAdamW without rules" in said


@pytest.mark.parametrize("repeat", [1, 2])
def test_means_of_parts_are_not_measured_either(repeat, tmp_path, caplog):
    """Nor is the one part that is whole: rules of a parameter need all its parts."""
    model = nn.Linear(6, 24, bias=False)
    parts = [{"size": 12 // repeat, "axes": axes} for axes in ([1], None)]
    rules = {"weight": {"split": 0, "parts": parts, "repeat": repeat}}
    optimizer = stepped(model, SlimAdamW(model.named_parameters(), rules=rules))
    tracker = measured(model, optimizer, tmp_path)
    assert tracker.records == []
    assert "averaged already: weight." in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_slimadamw_without_rules_is_measured_as_adamw(tmp_path, caplog):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    slim = stepped(model, SlimAdamW(model.named_parameters()))
    adamw = stepped(twin, torch.optim.AdamW(twin.parameters(), weight_decay=1e-2))
    ours = measured(model, slim, tmp_path).records
    theirs = measured(twin, adamw, tmp_path).records
    assert [r.key for r in ours] == [r.key for r in theirs]
    assert [r.snr for r in ours] == pytest.approx([r.snr for r in theirs], rel=1e-4)
    assert caplog.text == ""


def test_the_optimizer_of_another_model_is_refused_with_how_many(tmp_path):
    model, other = Net(), Net()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        ValueError,
        match=r"none of the 5 parameters of this AdamW is one of this "
        "Net: pass model= the very module",
    ):
        measured(other, optimizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_of_two_models_says_once_how_many_are_left_out(tmp_path, caplog):
    model, other = Net(), nn.Linear(3, 2)
    both = nn.ModuleList([model, other])
    optimizer = stepped(model, torch.optim.AdamW(both.parameters()))
    tracker = SNRTracker(save_dir=tmp_path)
    for step in (1, 2):
        tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
    assert {r.key for r in tracker.records} == {name for name, _ in model.named_parameters()}
    assert caplog.text.count("2 of the 7 parameters of this AdamW are not of this Net") == 1
    caplog.clear()
    measured(both, optimizer, tmp_path)
    assert caplog.text == ""


def test_v_never_goes_to_the_host_and_one_trip_carries_every_figure(tmp_path, monkeypatch):
    model = Net()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    trips = []
    plain = torch.Tensor.to

    def counted(self, *args, **kwargs):
        if args and args[0] == "cpu":
            trips.append(self.numel())
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    for forbidden in ("item", "cpu", "__float__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, forbidden, lambda *_: pytest.fail("a host sync"))
    import lowmem.slim.moments as moments

    monkeypatch.setattr(moments, "_leaf", moments._eager_leaf)  # as on any other device
    tracker = measured(model, optimizer, tmp_path)
    assert trips == [4 * len(tracker.records)]


def test_records_are_the_published_csv(tmp_path):
    model = Net()
    tracker = measured(model, stepped(model, torch.optim.AdamW(model.parameters())), tmp_path)
    path = tracker.save_all_results("final.csv")
    assert path == tmp_path / "final.csv"
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS) == "step,key,shape,compress_dims,snr,mean_sqr,var"
    assert lines[1].startswith('1,up.weight,"(10, 6)","(0,)",')
    assert lines[3].startswith('1,up.weight,"(10, 6)","(0, 1)",')
    assert lines[4].startswith('1,up.bias,"(10,)","(0,)",')
    assert [p.name for p in tmp_path.iterdir()] == ["final.csv"]


def test_what_was_measured_is_on_disk_at_once_and_goes_on_after_saving(tmp_path):
    model = Net()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    tracker = SNRTracker(save_dir=tmp_path)
    for step in (1, 2, 3):
        tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
        assert read_records(tracker.path) == tracker.records
    tracker.save_all_results("a.csv")
    tracker.measure_and_save(model=model, optimizer=optimizer, step=4)
    assert read_records(tmp_path / "a.csv") == tracker.records


def test_a_killed_run_keeps_what_it_measured(tmp_path):
    script = """
        import os, signal, sys, torch
        from lowmem import SNRTracker
        model = torch.nn.Linear(5, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        tracker = SNRTracker(save_dir=sys.argv[1])
        for step in range(1, 4):
            tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    (path,) = tmp_path.glob("*.csv")
    tracker = SNRTracker.load(path)
    assert {r.step for r in tracker.records} == {1, 2, 3}
    assert len(tracker.records) == 3 * 4
    assert set(tracker.rules(cutoff=0)) == {"weight", "bias"}


def test_a_line_torn_by_the_death_of_its_writer_is_left_out(tmp_path, caplog):
    model = Net()
    tracker = measured(model, stepped(model, torch.optim.AdamW(model.parameters())), tmp_path)
    text = tracker.path.read_bytes()
    start = text.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start + 1, len(text) - 26):
        tracker.path.write_bytes(text[:end])
        caplog.clear()
        assert read_records(tracker.path) == tracker.records[:-1]
        assert f"line {len(tracker.records) + 1} was torn off" in caplog.text


def test_load_continues_a_run(tmp_path):
    model = Net()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    first = measured(model, optimizer, tmp_path / "a")
    second = SNRTracker(save_dir=tmp_path / "b")
    assert second.load(first.path) is second
    second.measure_and_save(model=model, optimizer=optimizer, step=2)
    assert {r.step for r in read_records(second.path)} == {1, 2}
    with pytest.raises(ValueError, match="step 1"):
        second.load(first.path)


def test_a_disk_that_fails_does_not_end_the_training(tmp_path, caplog, monkeypatch):
    model = Net()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    tracker = measured(model, optimizer, tmp_path)
    whole = tracker.path.read_bytes()

    class Full:
        """A file on a full disk: half of what is written arrives."""

        def __init__(self, path, mode):
            self.file = real(path, mode)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

    real = open
    monkeypatch.setattr("lowmem.slim.snr.open", Full, raising=False)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=2)
    assert "No space left" in caplog.text
    assert tracker.path.read_bytes().startswith(whole)
    monkeypatch.undo()
    tracker.measure_and_save(model=model, optimizer=optimizer, step=3)
    assert read_records(tracker.path) == tracker.records
    assert {r.step for r in tracker.records} == {1, 2, 3}


def test_a_folder_that_was_removed_comes_back_whole(tmp_path):
    model = Net()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    tracker = measured(model, optimizer, tmp_path / "snr")
    tracker.path.unlink()
    (tmp_path / "snr").rmdir()
    tracker.measure_and_save(model=model, optimizer=optimizer, step=2)
    assert read_records(tracker.path) == tracker.records


def test_a_step_is_measured_once(tmp_path, caplog):
    model = Net()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    tracker = measured(model, optimizer, tmp_path)
    before = list(tracker.records)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=1)
    assert tracker.records == before
    assert "needs a new SNRTracker" in caplog.text


def test_before_the_first_step_nothing_is_measured(tmp_path, caplog):
    model = Net()
    tracker = measured(model, torch.optim.AdamW(model.parameters()), tmp_path)
    assert tracker.records == []
    assert "AdamW holds none for this model" in caplog.text
    with caplog.at_level(logging.WARNING):
        assert tracker.save_all_results("none.csv") is None
    assert not (tmp_path / "none.csv").exists()


def test_nothing_but_finite_figures_of_ordinary_training(tmp_path):
    model = Net()
    model.up.weight.register_hook(lambda grad: torch.zeros_like(grad))  # all-zero moment
    tracker = measured(model, stepped(model, torch.optim.AdamW(model.parameters())), tmp_path)
    assert not any(math.isnan(x) for r in tracker.records for x in (r.snr, r.mean_sqr, r.var))
    assert all(r.unknown for r in tracker.records if r.key == "up.weight")


def test_every_refusal_says_what_to_do(tmp_path):
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"SGD keeps no second moment.*AdamW"):
        measured(model, stepped(model, sgd), tmp_path)
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match="model must be"):
        SNRTracker(save_dir=tmp_path).measure_and_save(model=adam, optimizer=model, step=1)
    for options in ({"early_freq": 0}, {"late_freq": 1.5}, {"start_step": -1}, {"late_freq": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            SNRTracker(save_dir=tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SNRTracker(save_dir=tmp_path / "file")
    if os.getuid():  # root may write everywhere
        os.chmod(tmp_path, 0o500)
        with pytest.raises(OSError, match="Permission"):
            SNRTracker(save_dir=tmp_path / "inside")


@pytest.mark.parametrize("step", [3, 3.0, np.int64(3), torch.tensor(3), torch.tensor([3.0])])
def test_a_step_may_be_a_whole_number_of_any_type(step, tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    tracker = SNRTracker(save_dir=tmp_path)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=3)  # is there already
    assert read_records(tracker.path) == tracker.records
    assert {record.step for record in tracker.records} == {3}


@pytest.mark.parametrize(
    "step", [-1, 1.5, 10**19, float("nan"), float("inf"), True, "3", None, torch.ones(2)]
)
def test_what_is_no_step_is_refused(step, tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    tracker = SNRTracker(save_dir=tmp_path)
    with pytest.raises(ValueError, match="step must be a whole number"):
        tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
    assert tracker.records == []


@pytest.mark.parametrize("name", ["a\nb", "a\rb", " a ", "x" * 70_000, "\ud800"])
def test_a_name_that_fits_no_line_is_left_out_of_the_file(name, tmp_path, caplog):
    model = nn.Module()
    for each in (name, 'b,"c"'):
        model.register_parameter(each, nn.Parameter(torch.randn(4, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn(4, 3)
    optimizer.step()
    tracker = SNRTracker(save_dir=tmp_path)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=1)
    assert read_records(tracker.path) == tracker.records
    assert {record.key for record in tracker.records} == {'b,"c"'}
    assert "is not measured" in caplog.text


def test_a_file_that_somebody_cut_is_written_anew(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    tracker = SNRTracker(save_dir=tmp_path)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=1)
    for step, left in ((2, 0), (3, 40)):
        os.truncate(tracker.path, left)
        tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
        assert read_records(tracker.path) == tracker.records


@pytest.mark.parametrize("how", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_measures_on_into_a_file_of_its_own(how, tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    tracker = SNRTracker(save_dir=tmp_path)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=1)
    other = how(tracker)
    assert other.records == tracker.records
    tracker.measure_and_save(model=model, optimizer=optimizer, step=2)
    other.measure_and_save(model=model, optimizer=optimizer, step=3)
    for each, steps in ((tracker, {1, 2}), (other, {1, 3})):
        assert read_records(each.path) == each.records
        assert {record.step for record in each.records} == steps


def test_an_optimizer_without_second_moments_is_named_every_time(tmp_path, caplog):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped(model, optimizer)
    tracker = SNRTracker(save_dir=tmp_path)
    for step in (1, 100, 200):
        caplog.clear()
        tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
        assert f"no second moments at step {step}" in caplog.text
        assert "SGD holds none" in caplog.text
    with pytest.raises(ValueError, match="no records yet: call measure_and_save"):
        tracker.rules()


def test_the_file_of_a_run_is_shown_and_logged_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    tracker = SNRTracker(save_dir=tmp_path)
    assert repr(tracker) == "<SNRTracker: 0 records of 0 steps (no file yet)>"
    for step in (1, 2):
        tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
    assert caplog.text.count(str(tracker.path)) == 1
    assert (
        repr(tracker)
        == f"<SNRTracker: {len(tracker.records)} records of 2 steps in {tracker.path}>"
    )
