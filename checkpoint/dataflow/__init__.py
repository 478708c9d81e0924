"""The dataflow: what users write, how it becomes a graph, and the operators that run it."""
