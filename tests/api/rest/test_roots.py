"""Only what lies below a root can be named, whatever the path says."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.rest.roots import Roots
from statebackend.errors import HoldfastError


def test_relative_absolute_and_file_urls_name_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "sp").mkdir()
    roots = Roots((str(tmp_path),))
    named = {roots.place(path).url for path in ("sp", str(tmp_path / "sp"), f"file:{tmp_path}/sp", f"file://{tmp_path}/sp")}
    assert named == {str(tmp_path / "sp")}


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "file:///etc/passwd", "sp/../../x", "s3://bucket/x",
                                  "memory://x", "a\0b", "http://example.invalid/x", "//etc/passwd"])
def test_a_path_outside_the_roots_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(HoldfastError):
        Roots((str(tmp_path / "root"),)).place(path)


def test_a_symlink_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(HoldfastError):
        Roots((str(root),)).place("link/savepoint")


def test_a_sibling_that_shares_the_prefix_is_outside(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError):
        Roots((str(tmp_path / "root"),)).place(str(tmp_path / "root-evil"))


def test_s3_roots_take_both_spellings() -> None:
    roots = Roots(("s3://bucket/jobs",))
    assert roots.place("s3a://bucket/jobs/sp").url == "s3://bucket/jobs/sp"
    with pytest.raises(HoldfastError):
        roots.place("s3://bucket/jobs-other/sp")
