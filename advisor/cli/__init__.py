"""The command line: one file a command, no logic. Nothing here imports torch."""
