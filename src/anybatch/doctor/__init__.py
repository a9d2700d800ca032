"""Diagnosis of this machine: reports problems and their remedies.

The diagnosis must work when nothing else does, so this package does not import torch. All checks run in
child processes with deadlines, since a broken driver or library may hang or crash.
"""

from anybatch.doctor.examine import examine as examine
