"""Adapters for frameworks with their own training loop, and sinks for experiment trackers.

Each module requires the library that it is named after, and has to be imported by its full name:

    from anybatch.integrations.transformers import AnyBatch
"""
