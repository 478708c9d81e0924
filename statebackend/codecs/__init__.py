"""Python type <-> Arrow type <-> bytes. Grammar: docs/formats/codecs.md. The way in: `statebackend.types`."""
