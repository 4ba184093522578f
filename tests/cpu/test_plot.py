"""The Gantt chart: formats, content of the figure, and its one error of its own."""

import xml.etree.ElementTree as ElementTree

import pytest

from cute_dash.analysis import simulate
from cute_dash.plot import plot
from cute_dash.problem import ProblemShape
from schedules.baseline import Baseline

pytest.importorskip("matplotlib", reason="matplotlib, the `plot` extra, is not installed")


@pytest.fixture
def timeline():
    return simulate(Baseline(), ProblemShape(1, 2, 4, 4, 1, 1, causal=True), num_sms=5, compute=4, reduce=1)


def test_png(timeline, tmp_path):
    import matplotlib.image

    plot(timeline, tmp_path / "chart.png", title="baseline")
    pixels = matplotlib.image.imread(tmp_path / "chart.png")[..., :3]
    colors = {tuple(color) for color in (pixels.reshape(-1, 3)[::7] * 255).astype(int)}
    viridis = matplotlib.colormaps["viridis"].resampled(4)
    for m_block in range(4):
        expected = [int(channel * 255) for channel in viridis(m_block)[:3]]
        assert min(max(abs(a - b) for a, b in zip(color, expected, strict=True)) for color in colors) <= 1


def test_svg_says_title_and_makespan(timeline, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text, not as outlines
    plot(timeline, str(tmp_path / "chart.SVG"), title="my schedule")
    texts = [text.strip() for text in ElementTree.parse(tmp_path / "chart.SVG").getroot().itertext() if text.strip()]
    assert "my schedule" in texts
    assert any(f"makespan {timeline.makespan:g}, stalled" in text for text in texts)


def test_more_m_blocks_than_colors(tmp_path):
    timeline = simulate(Baseline(), ProblemShape(1, 1, 300, 2, 1, 1, causal=False), num_sms=2, compute=4, reduce=1)
    plot(timeline, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").stat().st_size > 0


@pytest.mark.parametrize("name", ["chart.pdf", "chart", "png"])
def test_other_suffix(timeline, tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in one of .png, .svg"):
        plot(timeline, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def _size(path):
    """Width and height of an SVG in points."""
    root = ElementTree.parse(path).getroot()
    return float(root.get("width").removesuffix("pt")), float(root.get("height").removesuffix("pt"))


def test_only_ctas_with_work_are_drawn(tmp_path, monkeypatch):
    """Two heads of 4 KV tiles are 8 work tiles: of 132 CTAs, 8 have one, and the chart is no higher than without the
    others."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    shape = ProblemShape(1, 2, 4, 4, 1, 1, causal=True)
    for num_sms in (8, 132):
        plot(simulate(Baseline(), shape, num_sms=num_sms, compute=4, reduce=1), tmp_path / f"{num_sms}.svg")
    assert _size(tmp_path / "132.svg") == _size(tmp_path / "8.svg")
    assert "8 of 132 CTAs have work" in (tmp_path / "132.svg").read_text()
    assert "CTAs have work" not in (tmp_path / "8.svg").read_text()


def test_a_chart_of_many_ctas_fits_a_screen(tmp_path):
    shape = ProblemShape(1, 132, 1, 1, 1, 1, causal=False)
    plot(simulate(Baseline(), shape, num_sms=132, compute=4, reduce=1), tmp_path / "chart.svg")
    _, height = _size(tmp_path / "chart.svg")
    assert height <= 14 * 72
