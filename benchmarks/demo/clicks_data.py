"""The demo's input: clicks of many users, a few of them far busier than the rest, in JSON lines files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILES = 8
USERS = 20_000


def write_clicks(folder: Path, clicks: int, seed: int = 7) -> None:
    """Write `clicks` records over `FILES` files; the same ones for the same seed."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for number, size in enumerate(len(part) for part in np.array_split(np.arange(clicks), FILES)):
        users = (USERS * random.random(size) ** 2).astype(int).tolist()
        pages = random.integers(0, 50, size).tolist()
        text = "".join(f'{{"user":"user-{user:05d}","page":"/page-{page}"}}\n' for user, page in zip(users, pages))
        (folder / f"part-{number}.jsonl").write_text(text)
