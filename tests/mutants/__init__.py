"""Seeded faults that the suite must notice."""
