"""The components of one rank of a run: passes, checkpoints, figures and rehearsal."""

from anybatch.rank.rehearsing import REHEARSED_PASSES as REHEARSED_PASSES
from anybatch.rank.rehearsing import can_rehearse as can_rehearse
