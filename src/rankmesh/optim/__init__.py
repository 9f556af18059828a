"""Updates, gradient norm and clipping, learning-rate schedules. Knows flat segments, not models."""
