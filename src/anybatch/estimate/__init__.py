"""Estimates of the memory and step time of a task under a choice, made without running it."""

from anybatch.estimate.allocator import allocator_notices as allocator_notices
from anybatch.estimate.calibration import remember as remember
from anybatch.estimate.eager import few_collections as few_collections
from anybatch.estimate.footprint import Footprint as Footprint
from anybatch.estimate.footprint import evaluation_peak as evaluation_peak
from anybatch.estimate.footprint import footprint as footprint
from anybatch.estimate.head import Head as Head
from anybatch.estimate.head import head_of as head_of
from anybatch.estimate.layout import Convolutions as Convolutions
from anybatch.estimate.layout import convolutions_of as convolutions_of
from anybatch.estimate.ledger import Holding as Holding
from anybatch.estimate.ledger import LayerBytes as LayerBytes
from anybatch.estimate.ledger import Ledger as Ledger
from anybatch.estimate.ledger import Moment as Moment
from anybatch.estimate.ledger import ledger as ledger
from anybatch.estimate.model_skeleton import Outline as Outline
from anybatch.estimate.peak import Peak as Peak
from anybatch.estimate.sharding import sums_of as sums_of
from anybatch.estimate.subject import Subject as Subject
from anybatch.estimate.subject import dtypes_of as dtypes_of
from anybatch.estimate.subject import identify as identify
from anybatch.estimate.subject import optimizer_options as optimizer_options
from anybatch.estimate.subject import subject_of as subject_of
from anybatch.estimate.untraced import why_untraced as why_untraced
