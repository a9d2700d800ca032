"""A disk that has little room left."""

from __future__ import annotations


class NearlyFull:
    """A file on a disk that takes ten more bytes."""

    def __init__(self, file):
        self.file, self.room = file, 10

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        taken, self.room = self.room, 0
        return self.file.write(data[:taken])

    def __getattr__(self, name):
        return getattr(self.file, name)
