"""Every Python snippet in README and docs runs as it stands, page by page, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python( [^\n]*)?\n(.*?)^```", re.S | re.M)
SPARK = re.compile(r"pyspark|spark_integration|\bspark\b")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    """The snippets of a page; one marked `python no-run` shows a fragment."""
    return [code for mark, code in FENCE.findall(page.read_text()) if "no-run" not in (mark or "")]


def cases() -> list[object]:
    found = []
    for page in pages():
        code = snippets(page)
        if code:
            marks = [pytest.mark.spark, pytest.mark.xdist_group("spark")] if SPARK.search("\n".join(code)) else []
            found.append(pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks))
    return found


@pytest.mark.parametrize("page", cases())
def test_the_snippets_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    """The snippets of a page build on each other, as a reader would paste them one after another."""
    script = tmp_path / "snippets.py"
    script.write_text("\n\n".join(snippets(page)))
    # The JVM of a snippet lives for seconds, and would spend most of them compiling.
    environment = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", **os.environ}
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], cwd=tmp_path, capture_output=True, text=True,
                          timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
