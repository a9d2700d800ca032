"""Adapters for frameworks that have a training loop of their own, and sinks for experiment trackers.

Each module needs the library that it is named after, and is imported by its full name only:

    from anybatch.integrations.transformers import AnyBatch
"""
