"""Helpers for tests of parallel code: a pool of worker processes, the single-process oracle, tiny
models.
"""
