"""S3 sessions: shared by those who reach the same server as the same user, ended when nobody wants them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.storage import FileStore
from checkpoint.storage.s3_sessions import IDLE_SECONDS, Sessions


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def made() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def sessions(clock: Clock, made: list[dict[str, Any]]) -> Sessions:
    def make(options: dict[str, Any]) -> Any:
        made.append(options)
        return SimpleNamespace(_s3=None)
    return Sessions(make, clock)


def test_the_same_options_get_the_same_session_and_others_another(sessions: Sessions, made: list[Any]) -> None:
    first = sessions.borrow({"key": "ann", "secret": "one"})
    assert sessions.borrow({"secret": "one", "key": "ann"}) is first
    assert sessions.borrow({"key": "bob", "secret": "one"}) is not first
    assert len(made) == 2


def test_other_credentials_in_the_environment_get_another_session(sessions: Sessions,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    first = sessions.borrow({})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody else")
    assert sessions.borrow({}) is not first


def test_a_session_waits_a_while_for_its_next_user_and_then_ends(sessions: Sessions, clock: Clock) -> None:
    first = sessions.borrow({})
    sessions.give_back(first)
    clock.now += IDLE_SECONDS - 1
    assert sessions.borrow({}) is first
    clock.now += 10 * IDLE_SECONDS  # in use, however long
    again = sessions.borrow({})
    assert again is first
    sessions.give_back(first)
    sessions.give_back(again)
    clock.now += IDLE_SECONDS
    assert sessions.borrow({}) is not first


def test_a_session_that_does_not_end_is_nothing_to_the_next_borrower(sessions: Sessions, clock: Clock, caplog: Any) -> None:
    first = sessions.borrow({"key": "ann"})
    first._s3, first.loop = object(), None  # no client that could be ended
    sessions.give_back(first)
    clock.now += IDLE_SECONDS
    assert sessions.borrow({"key": "bob"}) is not first
    assert "did not end" in caplog.text


def test_close_ends_only_what_nobody_uses(sessions: Sessions) -> None:
    used, idle = sessions.borrow({"key": "used"}), sessions.borrow({"key": "idle"})
    sessions.give_back(idle)
    sessions.close()
    assert sessions.borrow({"key": "used"}) is used
    assert sessions.borrow({"key": "idle"}) is not idle


def test_a_forked_child_starts_with_none(sessions: Sessions) -> None:
    first = sessions.borrow({})
    sessions.forget()
    assert sessions.borrow({}) is not first


def test_stores_of_one_bucket_share_a_session_and_closing_one_leaves_the_other_at_work(s3_root: str) -> None:
    with FileStore.at(f"{s3_root}/one") as one:
        with FileStore.at(f"{s3_root}/two") as two:
            two.write("file", b"content")
            assert two._driver.filesystem is one._driver.filesystem  # type: ignore[attr-defined]
        assert one.exists("file") is False
        one.write("file", b"here too")
    with FileStore.at(f"{s3_root}/two") as two:
        assert two.read("file") == b"content"
