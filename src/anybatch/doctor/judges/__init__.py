"""Judges: each tells of one subject what facts mean, and what to do. Pure functions: they look at
nothing, so any broken machine can be made up for a test."""
