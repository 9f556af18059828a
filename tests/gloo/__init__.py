"""Tests on 2 to 8 CPU processes."""
