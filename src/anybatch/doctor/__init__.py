"""doctor: what this machine has to train with, what is wrong with it, and the remedy.

It has to work where nothing else does: this package imports no torch. Everything is looked at in a
child process, each check within a deadline, since a broken driver or library may hang or crash.
"""

from anybatch.doctor.examine import examine as examine
from anybatch.doctor.finding import Finding as Finding
from anybatch.doctor.finding import Level as Level
from anybatch.doctor.finding import Report as Report
