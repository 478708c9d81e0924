"""Making a consistent cut of a running dataflow, and keeping it."""
