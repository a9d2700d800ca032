"""Planner: considers candidates, rejects them with reasons, and makes one plan."""

from anybatch.planner.evaluating import make_evaluation_plan as make_evaluation_plan
from anybatch.planner.knobs import Account as Account
from anybatch.planner.knobs import account as account
from anybatch.planner.knobs import smallest_micro_batch as smallest_micro_batch
from anybatch.planner.make import as_measured as as_measured
from anybatch.planner.make import default_ghost_notice as default_ghost_notice
from anybatch.planner.make import make_plan as make_plan
from anybatch.planner.make import untraced_plan as untraced_plan
from anybatch.planner.ranks import Layout as Layout
from anybatch.planner.ranks import layouts_of as layouts_of
from anybatch.planner.ranks import least_budget as least_budget
from anybatch.planner.remembered import Remembered as Remembered
from anybatch.planner.remembered import key_of as key_of
from anybatch.planner.setting import Wishes as Wishes
from anybatch.planner.setting import budget_notices as budget_notices
from anybatch.planner.setting import is_enforced as is_enforced
