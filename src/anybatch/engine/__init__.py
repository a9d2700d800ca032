"""The step: what a plan says, done; and done again when memory runs out."""

from anybatch.engine.bad_sample_search import OneByOne as OneByOne
from anybatch.engine.balance import Balance as Balance
from anybatch.engine.balance import Stragglers as Stragglers
from anybatch.engine.evaluation import Evaluation as Evaluation
from anybatch.engine.evaluation import Measured as Measured
from anybatch.engine.evaluation import Together as Together
from anybatch.engine.learning_rate import LearningRate as LearningRate
from anybatch.engine.limit import Limit as Limit
from anybatch.engine.limit import at_work as at_work
from anybatch.engine.limit import held_bytes as held_bytes
from anybatch.engine.limit import make_limit as make_limit
from anybatch.engine.limit import uncounted as uncounted
from anybatch.engine.meter import Meter as Meter
from anybatch.engine.outcome import Committed as Committed
from anybatch.engine.outcome import PassedOver as PassedOver
from anybatch.engine.randomness import Ambient as Ambient
from anybatch.engine.randomness import Keyed as Keyed
from anybatch.engine.randomness import KeyedByGrain as KeyedByGrain
from anybatch.engine.rehearsal import Rehearsed as Rehearsed
from anybatch.engine.skips import Skips as Skips
from anybatch.engine.source import MicroBatch as MicroBatch
from anybatch.engine.transaction import Transactions as Transactions
from anybatch.engine.update_room import to_reserve as to_reserve
from anybatch.engine.watchdog import Pulse as Pulse
from anybatch.engine.watchdog import Watchdog as Watchdog
from anybatch.engine.watchdog import checked_seconds as checked_seconds
