"""Rules of the house as tests: they read the source as text and start nothing heavy."""
