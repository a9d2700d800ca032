"""The process: its memory, files, threads, signals, standard streams, and the libraries in it.

This file is empty, so that importing a module of the package loads nothing else: some are used
before any slow import.
"""
