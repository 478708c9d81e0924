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


@pytest.mark.parametrize(("name", "value"), [
    ("unaligned", "yes"), ("unaligned", 1), ("exactly_once", None), ("incremental", 0), ("local_recovery", "no"),
    ("retain_on_cancellation", []), ("max_concurrent", 1.5), ("max_concurrent", "2"), ("retained", True), ("history", None),
    ("tolerable_failures", 0.0), ("savepoint_dir", 7), ("savepoint_dir", b"/sp"), ("interval", True), ("interval", [1]),
    ("timeout", None), ("min_pause", None), ("aligned_timeout", "later"),
])
def test_a_setting_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        CheckpointSettings(**{name: value})
    assert caught.value.context["setting"] == name


def test_settings_are_made_again_of_what_they_tell():
    settings = CheckpointSettings(interval="1s", unaligned=True, aligned_timeout="250ms", savepoint_dir="/sp", retained=3)
    assert CheckpointSettings(**settings.to_json()) == settings
    assert CheckpointSettings(**CheckpointSettings().to_json()) == CheckpointSettings()


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
