"""The process: its memory, files, threads, signals, standard streams, and the libraries in it.

Empty, so that a module of it loads nothing else: some run before anything slow is imported.
"""
