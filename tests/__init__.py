"""The test suite; each folder is a rung: rules, pure, one, gloo, mutants, gpu."""
