// A keyed count in Flink's own language; arguments: keys, events, backend (hashmap or rocksdb), checkpoint interval in ms (0: none), folder.

import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.util.Collector;

public class FlinkCount {
    static volatile long first, last, seen;

    public static class Count extends KeyedProcessFunction<Long, Long, Long> {
        private transient ValueState<Long> total;

        @Override
        public void open(OpenContext context) {
            total = getRuntimeContext().getState(new ValueStateDescriptor<>("total", Types.LONG));
        }

        @Override
        public void processElement(Long value, Context context, Collector<Long> out) throws Exception {
            if (seen++ == 0) {
                first = System.nanoTime();
            }
            Long old = total.value();
            long sum = old == null ? 1 : old + 1;
            total.update(sum);
            out.collect(sum);
        }

        @Override
        public void close() {
            last = System.nanoTime();
        }
    }

    public static void main(String[] arguments) throws Exception {
        long keys = Long.parseLong(arguments[0]), events = Long.parseLong(arguments[1]);
        Configuration settings = new Configuration();
        settings.setString("state.backend.type", arguments[2]);
        settings.setString("rest.bind-port", "0");
        settings.setString("rest.address", "127.0.0.1");
        settings.setString("rest.bind-address", "127.0.0.1");
        settings.setString("taskmanager.memory.managed.size", "512mb");
        settings.setString("execution.checkpointing.dir", "file://" + arguments[4]);
        settings.setString("execution.checkpointing.incremental", "true");
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
        environment.setParallelism(1);
        long interval = Long.parseLong(arguments[3]);
        if (interval > 0) {
            environment.enableCheckpointing(interval);
        }
        environment.fromSource(new NumberSequenceSource(0, events - 1), WatermarkStrategy.noWatermarks(), "numbers")
            .keyBy(number -> (number * 2654435761L >>> 7) % keys, Types.LONG)
            .process(new Count()).returns(Types.LONG).sinkTo(new DiscardingSink<>());
        environment.execute("count");
        System.out.println("{\"events_per_second\": " + events / ((last - first) / 1e9) + ", \"sum\": " + seen + "}");
        System.exit(0);
    }
}
