"""A seeded world in one thread: random jobs on the real coordinator, barrier handlers and subtasks, under faults."""
