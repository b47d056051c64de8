"""Still pictures, the picture of a second moment, and the menu over it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowmem import snr
from lowmem.ui import Picture, bars, curves, second_moment_explorer, second_moment_picture
from lowmem.ui.second_moment import relative_error


def test_bars_have_the_lengths_they_say(tmp_path: Path) -> None:
    picture = bars(
        "Two", {"left": {"a": 1.0, "b": [2.0, 4.0]}, "right": {"c": 0.0}}, line={"most": 3.0}
    )
    left = picture.figure.axes[0]
    assert [patch.get_width() for patch in left.patches] == [1.0, 3.0]
    assert "b 3  (2 to 4)" in picture.alt
    assert "most at 3" in picture.alt
    assert picture.alt.startswith("Two. left: a 1")
    picture.save(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert 'alt="Two.' in picture._repr_html_()
    assert repr(picture) == picture.alt


def test_bars_on_a_logarithmic_axis_take_zero() -> None:
    picture = bars("Log", {"": {"none": 0.0, "some": 10.0, "many": 1e6}}, log=True)
    low, high = picture.figure.axes[0].get_xlim()
    assert 0 < low < 10
    assert high > 1e6


def test_curves_draw_what_they_are_given() -> None:
    x = np.arange(1, 5)
    picture = curves(
        "Curve", {"one": (x, x**2), "two": (torch.arange(4), torch.ones(4))},
        xlabel="step", ylabel="value", cutoff=2.0, from_zero=True,
    )  # fmt: skip
    ax = picture.figure.axes[0]
    assert list(ax.lines[0].get_ydata()) == [1, 4, 9, 16]
    assert ax.get_ylim()[0] == 0
    assert "one from 1 at 1 to 16 at 4" in picture.alt
    assert "a dashed line at 2" in picture.alt


@pytest.mark.parametrize("panels", [{}, {"a": {}}])
def test_bars_of_nothing_are_refused(panels: dict[str, dict[str, float]]) -> None:
    with pytest.raises(ValueError, match="label to value"):
        bars("Nothing", panels)


def test_curves_of_nothing_or_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="lines is empty"):
        curves("Nothing", {}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match=r"odd: x and y have the shapes \(3,\) and \(2,\)"):
        curves("Odd", {"odd": ([1, 2, 3], [1, 2])}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="none: x and y"):
        curves("Odd", {"none": ([], [])}, xlabel="x", ylabel="y")


def test_the_relative_error_of_a_slice_is_one_over_one_plus_snr() -> None:
    v = torch.rand(1, 50, dtype=torch.float64) ** 3
    assert relative_error(v, 1) == pytest.approx(1 / (1 + snr(v, 1)), rel=1e-6)


def test_flat_rows_are_safe_and_uneven_columns_are_not() -> None:
    v = torch.logspace(-6, 0, 40)[:, None] * torch.full((1, 30), 2.0)
    picture = second_moment_picture(v, "layer.weight")
    assert isinstance(picture, Picture)
    assert (
        "averaged over axis 1 (row means): SNR inf, safe, relative squared error 0%" in picture.alt
    )
    assert "averaged over axis 0 (column means)" in picture.alt
    assert "not safe" in picture.alt.split("axis 0")[1]


def test_a_large_tensor_is_drawn_thinned() -> None:
    picture = second_moment_picture(torch.rand(1000, 700) + 0.1)
    assert max(max(image.get_array().shape) for image in picture.figure.axes[0].images) <= 200


@pytest.mark.parametrize(
    ("v", "message"),
    [(torch.ones(3), "two dimensions"), (torch.zeros(2, 2), "zero everywhere")],
)
def test_what_cannot_be_drawn_is_refused(v: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        second_moment_picture(v)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_the_menu_holds_the_matrices_and_the_picture_follows_it() -> None:
    pytest.importorskip("ipywidgets")
    explorer = second_moment_explorer(*trained())
    assert list(explorer.layer.options) == ["0.weight", "2.weight"]
    assert explorer.result.alt.startswith("Second moment of 0.weight, 16×8")
    before = explorer.answer
    explorer.layer.value = "2.weight"
    assert explorer.result.alt.startswith("Second moment of 2.weight, 4×16")
    assert explorer.answer != before


def test_an_error_of_the_menu_is_a_sentence_and_goes_away() -> None:
    pytest.importorskip("ipywidgets")
    explorer = second_moment_explorer(*trained())
    kept = explorer.moments["2.weight"].clone()
    explorer.moments["2.weight"].zero_()
    explorer.layer.value = "2.weight"
    assert "v is zero everywhere" in explorer.error.value
    explorer.moments["2.weight"].copy_(kept)
    explorer.update()
    assert explorer.error.value == ""


def test_a_menu_before_the_first_step_is_refused() -> None:
    pytest.importorskip("ipywidgets")
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="train a step first"):
        second_moment_explorer(model, torch.optim.AdamW(model.parameters()))
