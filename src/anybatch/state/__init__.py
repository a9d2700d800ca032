"""What training leaves behind, written safely and read back."""

from anybatch.state.adapters import has_adapters as has_adapters
from anybatch.state.adapters import save_adapters as save_adapters
from anybatch.state.base import frozen_checksums as frozen_checksums
from anybatch.state.checkpoints import Checkpoints as Checkpoints
from anybatch.state.checkpoints import Failed as Failed
from anybatch.state.checkpoints import Found as Found
from anybatch.state.checkpoints import Saved as Saved
from anybatch.state.content import Content as Content
from anybatch.state.training import Facts as Facts
from anybatch.state.training import TrainingState as TrainingState
from anybatch.state.weights import load_weights as load_weights
from anybatch.state.weights import save_weights as save_weights
from anybatch.state.weights import whole_state as whole_state
