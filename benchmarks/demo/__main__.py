"""`python -m benchmarks.demo`: tells the story on the terminal, step by step with its time, in about a minute."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.demo.story import COMMANDS, EXAMPLES, Story
from statebackend.errors import Conflict, HoldfastError, NotFound

MARKER = ".holdfast-demo"
"""A folder with this file in it is ours to empty."""
FEWEST_CLICKS = 200_000
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    chosen = arguments()
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ours(chosen.out):
            story = Story(chosen.out, chosen.clicks)
            tell(story, spark=chosen.spark)
            console.print(f"\nDone in {time.monotonic() - begun:.0f} s.")
            what_next(story)
    except KeyboardInterrupt:
        console.print(f"\nStopped. Nothing is left running; what there is so far is in {chosen.out}/.")
        return 130
    except HoldfastError as error:
        console.print(f"\n[red]The demo failed:[/] {escape(str(error))}")
        return error.exit_code
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for everything the demo makes")
    parser.add_argument("--clicks", type=int, default=600_000, help="records to count")
    parser.add_argument("--no-spark", dest="spark", action="store_false", help="leave out the part on Spark")
    chosen = parser.parse_args()
    if chosen.clicks < FEWEST_CLICKS:
        parser.error(f"--clicks must be at least {FEWEST_CLICKS:,}, so that there is a middle to kill the job in")
    return chosen


@contextmanager
def ours(out: Path) -> Iterator[None]:
    """An empty folder that no other demo uses. One that the demo did not make is left alone."""
    if not EXAMPLES.is_dir():
        raise NotFound("the demo runs from a clone of the repository", path=str(EXAMPLES))
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        raise Conflict("this folder holds something that the demo has not made", path=str(out),
                       hint="name another with --out")
    out.mkdir(parents=True, exist_ok=True)
    with (out / MARKER).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("another demo is running in this folder", path=str(out), hint="name another with --out") from None
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARKER:
                path.unlink()
        yield


def tell(story: Story, *, spark: bool) -> None:
    console.print("[bold]Holdfast[/]: one job, killed, restored, opened, and run again on Spark\n")
    step("Make clicks", story.make_clicks)
    step("Count them per user", story.run_undisturbed)
    step("Count again, and kill the process in the middle", story.run_and_kill)
    step("Restore at twice the parallelism", story.restore_at_another_parallelism)
    step("Write its checkpoint as an open savepoint, query it with DuckDB", story.open_savepoint)
    if not spark:
        console.print("[yellow]-[/] The part on Spark was left out, as asked.")
    elif not java():
        console.print("[yellow]-[/] There is no Java here, so the part on Spark was left out: install a JRE 17 "
                      "(openjdk-17-jre-headless) and run the demo again.")
    else:
        step("Run the very same function on Spark Structured Streaming", story.run_on_spark)
    compare(story)


def step(title: str, act: Callable[[], str]) -> None:
    begun = time.monotonic()
    with console.status(f"{title} ..."):
        said = act()
    console.print(f"[green]✓[/] [bold]{title}[/] [dim]{time.monotonic() - begun:.1f} s[/]")
    command = COMMANDS.get(act.__name__)
    if command is not None:
        console.print(f"    {command}", style="cyan", markup=False)
    console.print(f"    {said}", markup=False)


def java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return (home is not None and (Path(home) / "bin" / "java").exists()) or shutil.which("java") is not None


def compare(story: Story) -> None:
    """All ways of counting side by side; any difference fails the demo."""
    truth = story.figures[0].counts
    table = Table("who counted", "users", "clicks", "seconds", "clicks/s", title="\nThe same figures, five ways"
                  if len(story.figures) == 5 else "\nThe same figures", title_justify="left", title_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    wrong = [figure.name for figure in story.figures if figure.counts != truth]
    for figure in story.figures:
        rate = f"{story.clicks / figure.seconds:,.0f}" if figure.seconds else ""
        table.add_row(figure.name, f"{len(figure.counts):,}", f"{sum(figure.counts.values()):,}",
                      f"{figure.seconds:.1f}" if figure.seconds else "", rate)
    console.print(table)
    if wrong:
        raise HoldfastError(f"these differ from the count of the input: {', '.join(wrong)}")
    console.print(f"[green]✓[/] The counts of all {len(truth):,} users agree.")


def what_next(story: Story) -> None:
    out = os.path.relpath(story.out)
    programs = os.path.relpath(Path(sys.executable).parent, story.out)
    text = f"""
Everything is in {out}/: the job (clicks.py), its input (clicks/), output (counts/), checkpoints/, savepoint/,
what Spark made (spark-*/), and what the commands said (demo.log). Try next, from that folder:

  cd {out} && PATH=$PWD/{programs}:$PATH
  holdfast savepoint inspect savepoint
  holdfast savepoint query savepoint "select key, value from count.count order by value desc limit 5"
  holdfast savepoint diff savepoint spark-state --totals     # the state of both engines, key by key: the same
  cp clicks/part-0.jsonl clicks/part-8.jsonl                 # new clicks; both jobs go on where they were:
  holdfast run clicks.py:flow --checkpoint-dir checkpoints --restore latest --parallelism 3
  python spark_clicks.py 3
  holdfast serve --root .                                    # the web page, on http://127.0.0.1:8081/
"""
    if not (story.out / "spark-state").exists():
        text = "\n".join(line for line in text.split("\n") if not line.startswith("  ") or "spark" not in line)
    console.print(text, markup=False)


if __name__ == "__main__":
    sys.exit(main())
