"""Probes: each looks at one thing, in a process of its own, and returns a record of plain values.

A probe is a module with a function `look`. It judges nothing, and may fail, hang or crash.
"""

AHEAD = "ahead"
"""What a probe is asked that begins now with what it will be asked for later."""
