"""doctor: what is here to train with, what is wrong with it, and the remedy.

It has to work where nothing else does, so this floor imports no torch, asks in other processes, and
waits for nobody without a deadline.
"""

from anybatch.doctor.examine import Report as Report
from anybatch.doctor.examine import examine as examine
from anybatch.doctor.finding import Finding as Finding
from anybatch.doctor.finding import Level as Level
