"""Tests of one process, or of commands started as a user would."""
