"""Formulas: parameters, FLOPs, communication; and a catalogue of accelerators. No torch, no
measurement.
"""
