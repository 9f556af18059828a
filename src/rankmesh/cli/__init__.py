"""The command line: one small file a command, and the table that finds it in `main`."""
