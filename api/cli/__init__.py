"""The command line: thin faces of library calls. A command's module is loaded only when it is invoked."""
