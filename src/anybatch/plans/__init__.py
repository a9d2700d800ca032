"""Plans: how a task runs on a machine, as immutable data that a person can read and edit.

The planner writes plans and the engine runs them; plans are their only interface. A plan contains
everything that the engine needs: the engine has no other settings. It also contains the fallbacks for
running out of memory (`ladder`), so recovery does not need the planner.
"""

from anybatch.plans.candidates import Candidate as Candidate
from anybatch.plans.candidates import FrontierPoint as FrontierPoint
from anybatch.plans.candidates import Prediction as Prediction
from anybatch.plans.candidates import Rival as Rival
from anybatch.plans.choice import LOSS_SCALED as LOSS_SCALED
from anybatch.plans.choice import PRECISION_ALIASES as PRECISION_ALIASES
from anybatch.plans.choice import Choice as Choice
from anybatch.plans.choice import FreedMemory as FreedMemory
from anybatch.plans.choice import KernelChoices as KernelChoices
from anybatch.plans.choice import Precision as Precision
from anybatch.plans.choice import Recompute as Recompute
from anybatch.plans.choice import StatesOn as StatesOn
from anybatch.plans.choice import Update as Update
from anybatch.plans.names import parse_balance as parse_balance
from anybatch.plans.names import parse_chunked_loss as parse_chunked_loss
from anybatch.plans.names import parse_compile as parse_compile
from anybatch.plans.names import parse_exchange as parse_exchange
from anybatch.plans.names import parse_norms as parse_norms
from anybatch.plans.names import parse_norms_of_task as parse_norms_of_task
from anybatch.plans.names import parse_open_precision as parse_open_precision
from anybatch.plans.names import parse_parallel as parse_parallel
from anybatch.plans.names import parse_precision as parse_precision
from anybatch.plans.names import parse_recompute as parse_recompute
from anybatch.plans.names import parse_sharding as parse_sharding
from anybatch.plans.plan import Plan as Plan
from anybatch.plans.plan import TaskIdentity as TaskIdentity
from anybatch.plans.ranks import Balancing as Balancing
from anybatch.plans.ranks import Exchange as Exchange
from anybatch.plans.ranks import Link as Link
from anybatch.plans.ranks import Norms as Norms
from anybatch.plans.ranks import Outer as Outer
from anybatch.plans.ranks import Parallel as Parallel
from anybatch.plans.ranks import Sharding as Sharding
from anybatch.plans.ranks import num_units as num_units
