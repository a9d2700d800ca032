"""Parallel execution over several ranks; the interface is defined in `group.py`."""

from anybatch.parallel.choose import group_of as group_of
from anybatch.parallel.group import NUM_FIXED as NUM_FIXED
from anybatch.parallel.group import Agreed as Agreed
from anybatch.parallel.group import Group as Group
from anybatch.parallel.group import SingleDevice as SingleDevice
from anybatch.parallel.group import Wish as Wish
from anybatch.parallel.link import measured_link as measured_link
from anybatch.parallel.norms import PassAbandoned as PassAbandoned
from anybatch.parallel.replicate import Replicate as Replicate
from anybatch.parallel.vote import exchange as exchange
from anybatch.parallel.vote import from_rank_0 as from_rank_0
from anybatch.parallel.vote import leads as leads
