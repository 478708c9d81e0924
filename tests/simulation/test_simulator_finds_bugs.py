"""A simulator that finds nothing proves nothing: each classic mistake, put in on purpose, is found within few seeds."""

import pytest

from checkpoint.protocol.barriers import BarrierHandler
from checkpoint.protocol.coordinator import Coordinator
from checkpoint.runtime.channels import OutputChannel
from checkpoint.runtime.simulated.chain import SimChain
from checkpoint.runtime.simulated.storage import SimStorage
from checkpoint.runtime.simulator import SimulationFailed, main, simulate_many
from checkpoint.runtime.subtask import Subtask


def forget_channel_state(monkeypatch):
    monkeypatch.setattr(Subtask, "_capture", lambda self, channel, records: None)


def forget_output_buffers(monkeypatch):
    original = OutputChannel.overtake

    def overtake(self, barrier):
        original(self, barrier)
        return ()

    monkeypatch.setattr(OutputChannel, "overtake", overtake)


def never_block_a_channel(monkeypatch):
    class Nothing(set):
        def add(self, item):
            pass

    original = BarrierHandler.__init__

    def init(self, channels, ordered=()):
        original(self, channels, ordered)
        self.blocked = Nothing()

    monkeypatch.setattr(BarrierHandler, "__init__", init)


def commit_before_the_checkpoint_is_complete(monkeypatch):
    original = SimChain.snapshot

    def snapshot(self, checkpoint_id, options, target):
        pending = original(self, checkpoint_id, options, target)
        self.checkpoint_completed(checkpoint_id)
        return pending

    monkeypatch.setattr(SimChain, "snapshot", snapshot)


def restart_without_waiting_for_a_publication(monkeypatch):
    monkeypatch.setattr(Coordinator, "publishing", None)


def let_a_fenced_run_publish(monkeypatch):
    original = SimStorage.publish
    monkeypatch.setattr(SimStorage, "publish", lambda self, generation, publish, parallelism:
                        original(self, self.generation, publish, parallelism))


def let_broadcast_records_overtake_a_barrier(monkeypatch):
    original = BarrierHandler.on_barrier

    def on_barrier(self, channel, barrier, now_ms):
        actions = original(self, channel, barrier, now_ms)
        self.blocked -= self._ordered
        return actions

    monkeypatch.setattr(BarrierHandler, "on_barrier", on_barrier)


def let_a_barrier_overtake_broadcast_records(monkeypatch):
    original = BarrierHandler.__init__
    monkeypatch.setattr(BarrierHandler, "__init__", lambda self, channels, ordered=(): original(self, channels))


MISTAKES = [let_a_fenced_run_publish, let_broadcast_records_overtake_a_barrier, let_a_barrier_overtake_broadcast_records,
            forget_channel_state, forget_output_buffers, never_block_a_channel,
            commit_before_the_checkpoint_is_complete, restart_without_waiting_for_a_publication]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(SimulationFailed, match="replay it"):
        simulate_many(range(600))


def test_a_failing_range_prints_the_trace_of_the_first_failure(monkeypatch, capsys):
    forget_channel_state(monkeypatch)
    assert main(["--seeds", "0:200"]) == 1
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[0].startswith("seed ")
    assert lines[-1].startswith("FAILED: SimulationFailed: lost")
