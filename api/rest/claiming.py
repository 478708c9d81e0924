"""A launch by the service is claimed by the process that runs it: once, whatever was killed in between.

The claim is a file that must not exist yet. It stays when the process ends: a launch never runs a second time.
"""

from __future__ import annotations

import os
from pathlib import Path

CLAIM_VARIABLE = "HOLDFAST_LAUNCH_CLAIM"
SECOND = 17
"""Exit code of a process that found its launch claimed by another."""


def claim_launch() -> None:
    """Before anything of the job runs: claim the launch that this process was started for, if any, or end."""
    path = os.environ.pop(CLAIM_VARIABLE, None)
    if path is None:
        return
    # The name appears with the pid in it: whoever finds a claim can read it.
    draft = Path(f"{path}.{os.getpid()}")
    try:
        draft.write_text(str(os.getpid()))
        os.link(draft, path)
    except FileExistsError:
        raise SystemExit(SECOND) from None
    finally:
        draft.unlink(missing_ok=True)


def claimant(path: Path) -> int | None:
    """The process that claimed a launch; None where nobody has."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None
