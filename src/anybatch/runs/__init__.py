"""Runs: plan a task, train it, evaluate and export what came of it, go on with it.

planning     plan()        session      Session, one global step at a time
train        train()       saving       when a run saves, and how it stops
evaluate     evaluate()    reload_run   the task of a run that exists
export       export()      scale        scale()
"""
