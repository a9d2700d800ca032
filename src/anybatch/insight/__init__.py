"""Insight: analysis of the batch size, the ranks and the data of a run.

Everything here is a pure function of events or of plain numbers, without side effects.
"""
