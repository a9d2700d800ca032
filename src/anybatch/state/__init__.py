"""Safe writing and reading of checkpoints, weights and adapters."""

from anybatch.state.base import frozen_checksums as frozen_checksums
from anybatch.state.checkpoints import Checkpoints as Checkpoints
from anybatch.state.checkpoints import Content as Content
from anybatch.state.checkpoints import Failed as Failed
from anybatch.state.checkpoints import Saved as Saved
from anybatch.state.plain import converted as converted
from anybatch.state.plain import weights_of_checkpoint as weights_of_checkpoint
from anybatch.state.plain import weights_of_file as weights_of_file
from anybatch.state.pretrained import has_adapters as has_adapters
from anybatch.state.pretrained import is_pretrained as is_pretrained
from anybatch.state.pretrained import keep_pretrained as keep_pretrained
from anybatch.state.pretrained import save_adapters as save_adapters
from anybatch.state.training import TrainingState as TrainingState
from anybatch.state.weights import TORCH_SUFFIXES as TORCH_SUFFIXES
from anybatch.state.weights import check_can_be_written as check_can_be_written
from anybatch.state.weights import load_state as load_state
from anybatch.state.weights import load_weights as load_weights
from anybatch.state.weights import save_weights as save_weights
from anybatch.state.weights import whole_state as whole_state
from anybatch.state.weights import write_state as write_state
