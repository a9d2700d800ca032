"""One rank of a run: where data, engine and parallel meet."""

from anybatch.rank.rank import Rank as Rank
