"""Insight: what a run teaches about the batch, the ranks and the data it was given.

Everything here is a pure function of events or of plain numbers: nothing is changed by it.
"""
