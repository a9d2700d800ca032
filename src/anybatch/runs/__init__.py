"""Runs: plan, train, resume, evaluate and export.

planning     plan()        session      Session, which runs one global step at a time
train        train()       saving       when a run saves checkpoints, and how it stops
evaluate     evaluate()    reload_run   the task of an existing run
export       export()      scale        scale()
"""
