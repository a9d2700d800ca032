"""The step: what a plan says, done; and done again when memory runs out."""

from anybatch.engine.balance import Balance as Balance
from anybatch.engine.blame import OneByOne as OneByOne
from anybatch.engine.compile_trial import CompileTrial as CompileTrial
from anybatch.engine.evaluation import Evaluation as Evaluation
from anybatch.engine.evaluation import Together as Together
from anybatch.engine.garbage import SetAside as SetAside
from anybatch.engine.learning_rate import LearningRate as LearningRate
from anybatch.engine.limit import Limit as Limit
from anybatch.engine.limit import held_bytes as held_bytes
from anybatch.engine.limit import make_limit as make_limit
from anybatch.engine.meter import Meter as Meter
from anybatch.engine.outcome import Committed as Committed
from anybatch.engine.outcome import PassedOver as PassedOver
from anybatch.engine.pulse import Pulse as Pulse
from anybatch.engine.randomness import Ambient as Ambient
from anybatch.engine.randomness import Keyed as Keyed
from anybatch.engine.randomness import KeyedByGrain as KeyedByGrain
from anybatch.engine.rehearsal import Rehearsed as Rehearsed
from anybatch.engine.skips import Skips as Skips
from anybatch.engine.source import MicroBatch as MicroBatch
from anybatch.engine.straggler import Stragglers as Stragglers
from anybatch.engine.transaction import Transactions as Transactions
from anybatch.engine.transaction import to_reserve as to_reserve
from anybatch.engine.trial import Trial as Trial
from anybatch.engine.watchdog import Watchdog as Watchdog
from anybatch.engine.watchdog import checked_seconds as checked_seconds
