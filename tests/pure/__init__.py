"""Tests without processes."""
