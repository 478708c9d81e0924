"""Results for people: a table in the terminal, Markdown for the docs, and one HTML page with charts and no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import charts


def number(value: float | None) -> str:
    """A figure at a glance: 1.23M, 45.6k, 0.0123."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def verdict(contender: dict[str, Any]) -> str:
    """Where a ratio stands against what was asked."""
    floor, target, ratio = contender["asked_floor"], contender["asked_target"], contender["ratio"]
    if floor is None or ratio is None:
        return ""
    if ratio < floor:
        return f"below floor by {(1 - ratio / floor) * 100:.0f} %"
    return "target reached" if target is not None and ratio >= target else "floor held"


def _asked(contender: dict[str, Any]) -> str:
    floor, target = contender["asked_floor"], contender["asked_target"]
    return "" if floor is None else f"{floor:.3g}x" + (f" [{target:.3g}x]" if target is not None else "")


def _row(one: dict[str, Any], contender: dict[str, Any]) -> list[str]:
    if contender["failure"]:
        return [contender["name"], "–", "–", "–", "", contender["failure"]]
    note = "baseline" if contender["name"] == one["baseline"] else verdict(contender)
    if contender["name"] != one["baseline"] and not contender["stable"] and contender["rounds"] > 1:
        note = f"{note} (not stable)".strip()
    spread = f"±{contender['spread'] * 100:.0f} %" if contender["spread"] is not None else "–"
    return [contender["name"], f"{number(contender['median'])} {one['unit']}",
            f"{contender['ratio']:.3g}x" if contender["ratio"] is not None else "–", spread, _asked(contender), note]


HEADINGS = ("contender", "median", "ratio", "spread", "asked floor [target]", "")


def print_table(one: dict[str, Any], console: Console) -> None:
    """One benchmark in the terminal."""
    table = Table(title=f"{one['name']} (ratio to {one['baseline']})", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index in (1, 2, 3) else "left")
    for contender in one["contenders"]:
        table.add_row(*_row(one, contender))
    console.print(table)
    if one["growth"]:
        grown = Table(title=f"{one['name']}: growth", title_justify="left")
        for index, heading in enumerate(_growth_headings(one)):
            grown.add_column(heading, justify="right" if index else "left")
        for curve in one["growth"]["contenders"]:
            grown.add_row(*_growth_row(curve))
        console.print(grown)


def _growth_headings(one: dict[str, Any]) -> list[str]:
    growth = one["growth"]
    return [f"{one['unit']} at", *(f"{number(size)} {growth['of']}" for size in growth["sizes"]),
            f"{growth['cost']} grows as"]


def _growth_row(curve: dict[str, Any]) -> list[str]:
    slope = f"n^{curve['exponent']:.2f}" if curve["exponent"] is not None else "–"
    return [curve["name"], *map(number, curve["figures"]), slope]


def asked_rows(document: dict[str, Any]) -> list[list[str]]:
    """Everything that was asked: benchmark, contender, floor [target], reached, gap; what was not measured says so."""
    from benchmarks.registry import all_benchmarks

    measured = {one["name"] for one in document["benchmarks"]}
    rows = [[one["name"], contender["name"], _asked(contender),
             contender["failure"] or (f"{contender['ratio']:.3g}x" if contender["ratio"] is not None else "–"),
             verdict(contender) + _gap(contender)]
            for one in document["benchmarks"] for contender in one["contenders"] if contender["asked_floor"] is not None]
    for name, kind in sorted(all_benchmarks().items()):
        if name not in measured:
            rows += [[name, contender, _asked({"asked_floor": asked.floor, "asked_target": asked.target}),
                      "not measured in this run", ""] for contender, asked in kind.asked.items()]
    return rows


def _gap(contender: dict[str, Any]) -> str:
    floor, target, ratio = contender["asked_floor"], contender["asked_target"], contender["ratio"]
    if ratio is None or ratio < floor:
        return ""
    short = f", {(1 - ratio / target) * 100:.0f} % below target" if target is not None and ratio < target else ""
    return f" (+{(ratio / floor - 1) * 100:.0f} % over the floor{short})"


def losses(document: dict[str, Any]) -> list[str]:
    """One line for every contender of ours below what was asked, and for every figure that there is not."""
    lines = []
    for one in document["benchmarks"]:
        for contender in one["contenders"]:
            if contender["failure"]:
                lines.append(f"- **{one['name']}**, {contender['name']}: {contender['failure']}")
            elif contender["asked_floor"] is not None and (contender["ratio"] or 0) < contender["asked_floor"]:
                lines.append(f"- **{one['name']}**, {contender['name']}: {contender['ratio']:.3g} where "
                             f"{contender['asked_floor']:.3g} was asked ({verdict(contender)}).")
    return lines


def _table(headings: Sequence[str], rows: list[list[str]], right: tuple[int, ...] = ()) -> list[str]:
    rule = " | ".join("---:" if index in right else "---" for index in range(len(headings)))
    return ["| " + " | ".join(headings) + " |", f"| {rule} |",
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]


def markdown(document: dict[str, Any]) -> str:
    """The figures as Markdown."""
    machine = document["machine"]
    made = datetime.fromtimestamp(document["started"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"Made by `{document['command']}`, begun {made}, on {machine['cores']} cores ({machine['cpu']}), "
             f"{machine['memory_gib']} GiB, "
             f"Python {machine['python']}; " + ", ".join(f"{name} {text}" for name, text in document["versions"].items())
             + (". **Quick sizes.**" if document["quick"] else ".")
             + ("" if document["complete"] else " **The run was interrupted: partial results.**"), ""]
    for one in document["benchmarks"]:
        lines += [f"### {one['name']}", "", one["statement"], ""]
        lines += ["**Interrupted: fewer rounds than it takes.**", ""] if one["partial"] else []
        lines += _table(HEADINGS, [_row(one, contender) for contender in one["contenders"]], (1, 2, 3))
        if one["growth"]:
            curves = one["growth"]["contenders"]
            headings = _growth_headings(one)
            lines += ["", *_table(headings, [_growth_row(curve) for curve in curves], tuple(range(1, len(headings))))]
        lines.append("")
    return "\n".join(lines)


ASKED_HEADINGS = ("benchmark", "contender", "asked floor [target]", "reached", "gap")
_INTRODUCTION = """# Benchmarks

Ratios to a named baseline that was measured in the same run, contenders interleaved, a fresh key sequence in every round,
results checked inside every benchmark (a wrong answer is no figure). `asked` is the floor, and in brackets the target, that
was set before the work. *Growth* is the exponent k of cost ~ n^k over the sizes of the table: 0 does not grow, 1 grows
with the input. `holdfast bench list` states the work of each; `holdfast bench run NAME` repeats it; `--peers` adds Spark
and the peers, which have environments of their own (`holdfast bench peers`). This page is made by
`holdfast bench report RESULTS... --markdown docs/benchmarks.md`, the README's chart by
`holdfast bench chart RESULTS... --out docs/images/benchmarks.png`.
"""


def documentation(document: dict[str, Any]) -> str:
    """docs/benchmarks.md: what was asked and reached, where it is lost, then every figure."""
    lost = losses(document) or ["Nothing that was measured stays below what was asked."]
    return "\n".join([_INTRODUCTION, "## Asked and reached", "", *_table(ASKED_HEADINGS, asked_rows(document)), "",
                      "## Where we lose", "", *lost, "", "## Figures", "", markdown(document)])


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:24px auto;padding:0 16px;color:#17202a;
background:#fff}
h1{font-size:24px}h2{font-size:17px;margin-top:32px}table{border-collapse:collapse;font-size:14px}
td,th{padding:4px 10px;border-bottom:1px solid #dde2e6;text-align:left}.n{text-align:right}.bar{fill:#0f766e}
.base{fill:#94a3b8}.bad{fill:#b91c1c}.grid{stroke:#94a3b8;stroke-opacity:.4}
svg{max-width:900px}.muted{color:#5b6770}@media(prefers-color-scheme:dark){body{background:#11161b;
color:#e4e9ed}td,th{border-color:#2c363f}text{fill:#e4e9ed}}"""


def html_page(document: dict[str, Any]) -> str:
    """One page with a ratio chart and a table per benchmark; nothing is loaded from anywhere."""
    machine = document["machine"]
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Holdfast benchmarks</title><style>{_STYLE}</style>",
             "<h1>Holdfast benchmarks</h1>",
             f"<p class=muted>{html.escape(document['command'])} · {machine['cores']} cores, {html.escape(machine['cpu'])}, "
             f"{machine['memory_gib']} GiB · Python {machine['python']}</p>",
             "" if document["complete"] else "<p><b>The run was interrupted: partial results.</b></p>"]
    for one in document["benchmarks"]:
        parts.append(f"<h2>{html.escape(one['name'])}</h2><p>{html.escape(one['statement'])}</p>{charts.ratio_bars(one)}<table><tr>")
        parts += [f"<th>{heading}</th>" for heading in HEADINGS]
        for contender in one["contenders"]:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(one, contender))
            parts.append(f"<tr>{cells}</tr>")
        parts.append(f"</table>{charts.growth_curves(one)}")
    parts.append("<h2>Asked and reached</h2><table><tr>" + "".join(f"<th>{heading}</th>" for heading in ASKED_HEADINGS))
    parts += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in asked_rows(document)]
    parts.append("</table>")
    return "".join(parts)
