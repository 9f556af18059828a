"""What can be seen of a run: logs, metrics, timers, memory, its folder. It must not know models."""
