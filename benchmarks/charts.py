"""Charts as SVG: ratio bars, growth curves and the main chart, which a headless browser turns into a PNG."""

from __future__ import annotations

import html
import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from statebackend.errors import InvalidRequest, NotFound, Unavailable

COLOURS = ("#0f766e", "#b45309", "#4338ca", "#be123c", "#0369a1", "#4d7c0f", "#7e22ce", "#64748b")
MAIN = (
    ("memory-fold-int", "holdfast", "Arrow fold, memory"),
    ("memory-fold-str", "holdfast", "the same, string keys"),
    ("rocksdb-fold-hot", "holdfast", "Arrow fold, RocksDB, hot keys"),
    ("rocksdb-rmw-hot", "holdfast", "per record, RocksDB, hot keys"),
    ("dataflow-peers-snapshots", "holdfast", "dataflow, snapshots every second"),
    ("dataflow-peers", "holdfast", "dataflow, no snapshots"),
    ("spark-per-record", "holdfast rocksdb", "per record on Spark"),
    ("spark-aggregate-1m", "holdfast rocksdb", "aggregation on Spark, 1M keys"),
    ("savepoint-read", "holdfast", "savepoint read"),
    ("memory-rmw-uniform", "holdfast", "per record, memory"),
    ("rocksdb-rmw-uniform", "holdfast", "per record, RocksDB"),
)
"""Benchmark, contender and label of the rows of the main chart; those not measured are left out."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def ratio_bars(one: dict[str, Any]) -> str:
    """Bars of the ratios, the baseline in grey, what stays below an asked floor in red."""
    shown = [contender for contender in one["contenders"] if contender["ratio"] is not None]
    top = max((contender["ratio"] for contender in shown), default=1) or 1
    bars = []
    for index, contender in enumerate(shown):
        y, width = index * 26 + 4, max(2.0, contender["ratio"] / top * 500)
        below = contender["asked_floor"] is not None and contender["ratio"] < contender["asked_floor"]
        kind = "bad" if below else "base" if contender["name"] == one["baseline"] else "bar"
        bars.append(f'<text x="0" y="{y + 14}">{html.escape(contender["name"])}</text>'
                    f'<rect class="{kind}" x="260" y="{y}" width="{width:.1f}" height="18" rx="3"/>'
                    f'<text x="{266 + width:.1f}" y="{y + 14}">{contender["ratio"]:.3g}x</text>')
    height = len(shown) * 26 + 8
    return f'<svg viewBox="0 0 900 {height}" width="100%" font-size="13" role="img">{"".join(bars)}</svg>'


def growth_curves(one: dict[str, Any]) -> str:
    """Cost over size on two logarithmic axes, a line for each contender with its exponent; nothing without growth."""
    growth = one.get("growth")
    if not growth:
        return ""
    lines = [(curve["name"], curve["exponent"], _points(one, growth, curve)) for curve in growth["contenders"]]
    lines = [line for line in lines if len(line[2]) > 1]
    if not lines:
        return ""
    low_x, high_x = math.log10(growth["sizes"][0]), math.log10(growth["sizes"][-1])
    costs = [cost for _, _, points in lines for _, cost in points]
    low_y, high_y = math.floor(min(costs) * 2) / 2, math.ceil(max(costs) * 2 + 0.01) / 2
    parts = [f'<text x="0" y="14">{html.escape(growth["cost"])}</text>']
    for size in growth["sizes"]:
        x = _scaled(math.log10(size), low_x, high_x, 60, 520)
        parts.append(f'<line class="grid" x1="{x:.0f}" y1="24" x2="{x:.0f}" y2="204"/>'
                     f'<text x="{x:.0f}" y="222" text-anchor="middle">{size:,}</text>')
    for value in (low_y, high_y):
        y = _scaled(value, low_y, high_y, 204, 24)
        parts.append(f'<line class="grid" x1="60" y1="{y:.0f}" x2="520" y2="{y:.0f}"/>'
                     f'<text x="54" y="{y + 4:.0f}" text-anchor="end">{10 ** value:.2g}</text>')
    parts.append(f'<text x="290" y="240" text-anchor="middle">{html.escape(growth["of"])}</text>')
    for index, (name, slope, points) in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        places = [(_scaled(x, low_x, high_x, 60, 520), _scaled(y, low_y, high_y, 204, 24)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        text = f"{name}: n^{slope:.2f}" if slope is not None else name
        parts.append(f'<rect x="550" y="{30 + index * 22}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="568" y="{41 + index * 22}">{html.escape(text)}</text>')
    height = max(248, 40 + 22 * len(lines))
    return f'<svg viewBox="0 0 900 {height}" width="100%" font-size="13" role="img">{"".join(parts)}</svg>'


def _points(one: dict[str, Any], growth: dict[str, Any], curve: dict[str, Any]) -> list[tuple[float, float]]:
    return [(math.log10(size), math.log10(1 / figure if one["higher_is_better"] else figure))
            for size, figure in zip(growth["sizes"], curve["figures"]) if figure]


def _scaled(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (value - low) / ((high - low) or 1) * (end - start)


def main_rows(document: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Label, baseline and ratio of what the main chart shows."""
    known = {(one["name"], contender["name"]): (one["baseline"], contender["ratio"])
             for one in document["benchmarks"] for contender in one["contenders"]}
    found = [(label, *known[name, contender]) for name, contender, label in MAIN if (name, contender) in known]
    return [(label, baseline, ratio) for label, baseline, ratio in found if ratio]


def main_chart(document: dict[str, Any]) -> str:
    """The chart of the README, on a logarithmic scale, losses included."""
    rows = main_rows(document)
    if not rows:
        raise NotFound("none of the main chart's benchmarks is in these results",
                       hint=f"run some of {', '.join(name for name, _, _ in MAIN[:4])}, ...")
    height = 78 + 32 * len(rows)
    low, high = min(0.1, *(ratio for *_, ratio in rows)), max(2.0, *(ratio for *_, ratio in rows))

    def place(ratio: float) -> float:
        return _scaled(math.log10(ratio), math.log10(low), math.log10(high), 410, 800)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 892 {height}" width="892" height="{height}" '
             'font-family="system-ui,sans-serif" font-size="15"><rect width="892" height="100%" fill="#fff"/>',
             '<text x="16" y="30" font-size="17" font-weight="bold">Throughput as a multiple of the baseline</text>']
    for index, (label, baseline, ratio) in enumerate(rows):
        y, (left, right) = 50 + index * 32, sorted((place(1.0), place(ratio)))
        colour = COLOURS[0] if ratio >= 1 else COLOURS[1]
        parts.append(f'<text x="16" y="{y + 15}">{html.escape(label)} <tspan fill="#5b6770">against {html.escape(baseline)}'
                     f'</tspan></text><rect x="{left:.1f}" y="{y}" width="{max(2.0, right - left):.1f}" height="20" rx="3" '
                     f'fill="{colour}"/><text x="{place(ratio) + 8 if ratio >= 1 else place(1.0) + 8:.1f}" y="{y + 15}">'
                     f'{ratio:.2f}x</text>')
    machine = document["machine"]
    parts.append(f'<line x1="{place(1.0):.1f}" y1="42" x2="{place(1.0):.1f}" y2="{height - 28}" stroke="#17202a"/>'
                 f'<text x="16" y="{height - 10}" font-size="13" fill="#5b6770">log scale; {machine["cores"]} cores, '
                 'medians of interleaved rounds; docs/benchmarks.md has all figures, losses included</text></svg>')
    return "".join(parts)


def save(picture: str, path: Path) -> Path:
    """Write an SVG as it is, or as PNG through a headless browser; without one the SVG is kept and the reason told."""
    if path.suffix not in (".png", ".svg"):
        raise InvalidRequest("a chart is a .png or an .svg file", path=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(picture)
        return path
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        path.with_suffix(".svg").write_text(picture)
        raise Unavailable("a PNG needs Chromium, which is not here; the SVG was written instead",
                          path=str(path.with_suffix(".svg")), hint="install chromium, or give a name that ends with .svg")
    width, height = (int(text) for text in picture.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split())
    with tempfile.TemporaryDirectory(prefix="holdfast-chart-") as folder:
        page = Path(folder) / "chart.html"
        page.write_text(f'<!doctype html><meta charset=utf-8><body style="margin:0">{picture}')
        done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                               f"--user-data-dir={folder}/profile", f"--window-size={width},{height}",
                               f"--screenshot={path.resolve()}", page.as_uri()], capture_output=True, text=True, timeout=120)
    if done.returncode != 0 or not path.is_file():
        raise Unavailable("the browser drew no picture", path=str(path), found=done.stderr.strip()[-200:],
                          hint="give a name that ends with .svg")
    return path
