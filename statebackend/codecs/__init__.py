"""Python type <-> Arrow type <-> bytes. The grammar is in docs/formats/codecs.md; `statebackend.types` is the way in."""
