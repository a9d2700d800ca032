"""Insight: what the batch is worth, and what follows from changing it. Figures and advice as plain
data; nothing here changes a run, or touches a tensor or a device."""
