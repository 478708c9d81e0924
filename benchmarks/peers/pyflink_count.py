"""Run inside PyFlink's environment: a keyed count; arguments: keys, events, mode (thread or process), backend."""

import json
import os
import sys
import sysconfig
import tempfile
import time

from pyflink.common import Configuration, Types, WatermarkStrategy
from pyflink.datastream import KeyedProcessFunction, StreamExecutionEnvironment
from pyflink.datastream.connectors.number_seq import NumberSequenceSource
from pyflink.datastream.state import ValueStateDescriptor

# Thread mode embeds an interpreter in the JVM, which does not know of this environment unless it is told.
os.environ["PYTHONPATH"] = sysconfig.get_path("purelib")
keys, events, mode, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
result = os.path.join(tempfile.mkdtemp(), "result.json")
configuration = Configuration()
for name, value in {
    "state.backend.type": backend, "python.execution-mode": mode, "python.executable": sys.executable,
    "parallelism.default": "1", "taskmanager.memory.managed.size": "512mb", "taskmanager.numberOfTaskSlots": "1",
    "rest.bind-address": "127.0.0.1", "rest.address": "127.0.0.1", "rest.bind-port": "0",
    "taskmanager.memory.network.min": "64mb", "taskmanager.memory.network.max": "64mb",
    "taskmanager.memory.task.heap.size": "1gb",
}.items():
    configuration.set_string(name, value)
environment = StreamExecutionEnvironment.get_execution_environment(configuration)
environment.set_parallelism(1)


class Count(KeyedProcessFunction):
    def __init__(self, expected, path):
        self.expected, self.path = expected, path

    def open(self, context):
        self.state = context.get_state(ValueStateDescriptor("count", Types.LONG()))
        self.seen, self.started = 0, None

    def process_element(self, value, context):
        import time as clock

        if self.started is None:
            self.started = clock.perf_counter()
        self.state.update((self.state.value() or 0) + 1)
        self.seen += 1
        if self.seen == self.expected:
            seconds = clock.perf_counter() - self.started
            with open(self.path, "w") as stream:
                stream.write(json.dumps({"events_per_second": self.seen / seconds, "sum": self.seen}))
        return []


numbers = environment.from_source(NumberSequenceSource(0, events - 1), WatermarkStrategy.no_watermarks(), "numbers",
                                  Types.LONG())
numbers.key_by(lambda number: number % keys, key_type=Types.LONG()).process(Count(events, result), Types.LONG()).print()
environment.execute("count")
time.sleep(0)
with open(result) as stream:
    print(stream.read())
