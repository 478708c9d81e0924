"""The service: a registry of jobs, REST in Flink's shape, and savepoint management over HTTP."""
