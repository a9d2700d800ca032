"""Which sample, when, where: order, steps, shares, micro-batches; independent of the plan.

May import errors, units and task, and torch; knows no model, no plan and no rank but as a number.
"""

from anybatch.data.collation import Collate as Collate
from anybatch.data.cut import divided_ghosts as divided_ghosts
from anybatch.data.cut import ghosts as ghosts
from anybatch.data.cut import micro_batches as micro_batches
from anybatch.data.cut import share as share
from anybatch.data.evaluation import evaluation_batches as evaluation_batches
from anybatch.data.failure import Bad as Bad
from anybatch.data.failure import BadSamples as BadSamples
from anybatch.data.failure import Place as Place
from anybatch.data.failure import told_samples as told_samples
from anybatch.data.fetch import Piece as Piece
from anybatch.data.fetch import Request as Request
from anybatch.data.fetch import open_fetch as open_fetch
from anybatch.data.fetch import sizes_alone as sizes_alone
from anybatch.data.generators import restore as restore
from anybatch.data.generators import seed_by as seed_by
from anybatch.data.generators import snapshot as snapshot
from anybatch.data.lengths import Extent as Extent
from anybatch.data.lengths import lengths_of as lengths_of
from anybatch.data.lengths import lengths_of_step as lengths_of_step
from anybatch.data.lengths import micro_batches_by_length as micro_batches_by_length
from anybatch.data.lengths import ordered as ordered
from anybatch.data.lengths import padded_size as padded_size
from anybatch.data.loader import Cut as Cut
from anybatch.data.loader import Loader as Loader
from anybatch.data.loader import StepData as StepData
from anybatch.data.loader import is_map_style as is_map_style
from anybatch.data.loader import num_samples_of as num_samples_of
from anybatch.data.microbatch import batch_size as batch_size
from anybatch.data.microbatch import map_leaves as map_leaves
from anybatch.data.microbatch import parts_of as parts_of
from anybatch.data.microbatch import slice_batch as slice_batch
from anybatch.data.microbatch import split as split
from anybatch.data.microbatch import to_device as to_device
from anybatch.data.opening import open_training as open_training
from anybatch.data.opening import steps_of as steps_of
from anybatch.data.order import Order as Order
from anybatch.data.order import mix as mix
from anybatch.data.order import permutation as permutation
from anybatch.data.prefetch import on_device as on_device
from anybatch.data.resize import resized as resized
from anybatch.data.schedule import Span as Span
from anybatch.data.schedule import Steps as Steps
from anybatch.data.stream import StreamLoader as StreamLoader
from anybatch.data.tree import Node as Node
from anybatch.data.tree import Waiting as Waiting
from anybatch.data.tree import join as join
from anybatch.data.tree import nodes_of as nodes_of
from anybatch.data.tree import part_at as part_at
from anybatch.data.tree import parts_of_rank as parts_of_rank
from anybatch.data.workers import Beside as Beside
