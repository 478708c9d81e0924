"""Human durations and sizes, and the arithmetic of TTL."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from statebackend import Cleanup, InvalidRequest, TimeDomain, TtlConfig, UpdateType, Visibility
from statebackend.durations import duration_ms, size_bytes
from statebackend.ttl import NEVER, expires_at, is_expired


@pytest.mark.parametrize(("text", "expected"), [
    ("500ms", 500), ("10s", 10_000), ("5m", 300_000), ("5 min", 300_000), ("2h", 7_200_000), ("7d", 604_800_000),
    ("1w", 604_800_000), ("1.5 h", 5_400_000), (" 3s ", 3000), ("3S", 3000), (250, 250), (timedelta(days=1), 86_400_000),
    (1.4, 1), (timedelta(milliseconds=1), 1), (timedelta.max, timedelta.max // timedelta(milliseconds=1)),
])
def test_durations_in_milliseconds(text: Any, expected: int) -> None:
    assert duration_ms(text) == expected


@pytest.mark.parametrize("wrong", ["", "7", "d", "7 days ago", "-1s", "1e3s", None, True, [], "7x", math.nan, math.inf,
                                   "٣s"])
def test_what_is_no_duration_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a duration"):
        duration_ms(wrong)


@pytest.mark.parametrize(("text", "expected"), [
    ("4096", 4096), ("64KiB", 65_536), ("64MiB", 67_108_864), ("1.5GB", 1_500_000_000), ("2 gib", 2**31), ("10b", 10),
    (77, 77), ("1TiB", 2**40), ("1tb", 10**12),
])
def test_sizes_in_bytes(text: Any, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize("wrong", ["", "MiB", "64 MiBs", None, False, "-1", 1.5, -1])
def test_what_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a size"):
        size_bytes(wrong)


def test_an_entry_is_expired_from_its_expiry_on() -> None:
    assert expires_at(1000, 50) == 1050
    assert not is_expired(1050, 1049)
    assert is_expired(1050, 1050)
    assert expires_at(NEVER - 1, 50) == NEVER


def test_a_ttl_survives_json() -> None:
    config = TtlConfig("7d", UpdateType.ON_READ_AND_WRITE, Visibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP, TimeDomain.EVENT)
    again = TtlConfig.from_json(config.to_json())
    assert again == config
    assert again.ttl_ms == 604_800_000
    assert again.updates_on_read
    assert again.returns_expired


@pytest.mark.parametrize("ttl", [0, "0s", timedelta(0), -5, timedelta(microseconds=1), "soon"])
def test_a_ttl_that_is_no_time_is_refused(ttl: Any) -> None:
    with pytest.raises(InvalidRequest):
        TtlConfig(ttl)


def test_names_may_be_given_in_place_of_members_and_wrong_ones_are_refused() -> None:
    assert TtlConfig(5, "on_read_and_write", time="event").time is TimeDomain.EVENT  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="sometimes"):
        TtlConfig(5, "sometimes")  # type: ignore[arg-type]


def test_no_clean_up_switches_each_strategy_off() -> None:
    assert Cleanup.none() == Cleanup(False, False, 0, False, False)


@pytest.mark.parametrize("too_long", [2**62, "99999999999999d"])
def test_a_ttl_beyond_what_time_can_count_is_refused(too_long: Any) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        TtlConfig(too_long)
