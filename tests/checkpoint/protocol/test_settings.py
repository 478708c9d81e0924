"""Settings: what is accepted, and what is refused at once with the reason."""

from datetime import timedelta

import pytest

from checkpoint.protocol.settings import CheckpointSettings
from checkpoint.runtime.contracts import CheckpointKind
from statebackend.errors import InvalidRequest


def test_durations_are_read_as_people_write_them():
    settings = CheckpointSettings(interval="1s", timeout=timedelta(minutes=2), min_pause="250ms")
    assert (settings.interval_ms, settings.timeout_ms, settings.min_pause_ms) == (1000, 120_000, 250)
    assert settings.enabled
    assert not CheckpointSettings().enabled


@pytest.mark.parametrize(("settings", "words"), [
    ({"unaligned": True, "exactly_once": False}, "at-least-once"),
    ({"unaligned": True, "max_concurrent": 2}, "overlap"),
    ({"aligned_timeout": "1s"}, "aligned_timeout needs"),
    ({"min_pause": "1s", "max_concurrent": 2}, "pause"),
    ({"unaligned": True, "aligned_timeout": "10m", "timeout": "1m"}, "never reached"),
    ({"interval": 0}, "interval"),
    ({"retained": 0}, "retained"),
    ({"tolerable_failures": -1}, "tolerable_failures"),
    ({"interval": "soon"}, "duration"),
])
def test_settings_that_exclude_each_other_are_refused_with_the_reason(settings, words):
    with pytest.raises(InvalidRequest, match=words):
        CheckpointSettings(**settings)


def test_an_aligned_timeout_starts_aligned():
    options = CheckpointSettings(unaligned=True, aligned_timeout="1s").checkpoint_options()
    assert (options.unaligned, options.aligned_timeout_ms) == (False, 1000)
    at_once = CheckpointSettings(unaligned=True, aligned_timeout=0).checkpoint_options()
    assert (at_once.unaligned, at_once.aligned_timeout_ms) == (True, None)


def test_savepoints_are_aligned_full_and_have_a_folder():
    settings = CheckpointSettings(unaligned=True, savepoint_dir="/sp")
    options = settings.savepoint_options(location=None)
    assert (options.kind, options.unaligned, options.full, options.location) == \
        (CheckpointKind.SAVEPOINT, False, True, "/sp")
    assert settings.savepoint_options(location="/other").location == "/other"
    with pytest.raises(InvalidRequest, match="folder"):
        CheckpointSettings().savepoint_options(location=None)
    with pytest.raises(InvalidRequest, match="drain"):
        settings.savepoint_options(location=None, drain=True)


def test_rest_shows_the_fields_of_flink():
    config = CheckpointSettings(interval="1m", unaligned=True).rest_config(state_backend="rocksdb")
    assert config["interval"] == 60_000
    assert config["unaligned_checkpoints"] is True
    assert config["externalization"] == {"enabled": True, "delete_on_cancellation": False}
