"""Benches: ``python -m bench``, ``python -m bench memory``, ``python -m bench simt``.

cuflash and whatever rivals are installed compute the same attention on the same arrays, in one
process. Numbers are checked against float64 before anything is timed.
"""
