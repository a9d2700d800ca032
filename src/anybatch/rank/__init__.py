"""One rank of a run: where data, engine and parallel meet."""

from anybatch.rank.rank import REHEARSED_PASSES as REHEARSED_PASSES
from anybatch.rank.rank import Rank as Rank
from anybatch.rank.rehearsing import can_rehearse as can_rehearse
