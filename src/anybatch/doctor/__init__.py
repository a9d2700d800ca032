"""doctor: examine this machine, report what is wrong with it and how to repair it.

It has to work where nothing else does, so this package does not import torch. Everything is examined in
child processes with deadlines, since a broken driver or library may hang or crash.
"""

from anybatch.doctor.examine import examine as examine
from anybatch.doctor.finding import Finding as Finding
from anybatch.doctor.finding import Level as Level
from anybatch.doctor.finding import Report as Report
