"""Step: an exact global step of any size inside an existing training loop."""

from anybatch.step.batches import check_cutting as check_cutting
from anybatch.step.step import Outcome as Outcome
from anybatch.step.step import Step as Step
