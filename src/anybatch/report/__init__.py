"""Reports of runs and plans: a log file, a progress display, tables, an HTML page.

The report of a run is generated from its folder alone, on any machine: from its events and its plan.
"""

from anybatch.report.folder import PastRun as PastRun
from anybatch.report.folder import RunFolder as RunFolder
from anybatch.report.folder import last_plan as last_plan
from anybatch.report.folder import new_folder as new_folder
from anybatch.report.folder import next_folder as next_folder
from anybatch.report.folder import output_folder as output_folder
from anybatch.report.folder import read_run as read_run
from anybatch.report.folder import run_files as run_files
from anybatch.report.folder import run_folder as run_folder
from anybatch.report.log import Ending as Ending
from anybatch.report.log import EventLog as EventLog
from anybatch.report.log import follow as follow
from anybatch.report.log import read as read
from anybatch.report.memory import print_ledger as print_ledger
from anybatch.report.memory_page import write_frontier as write_frontier
from anybatch.report.memory_page import write_ledger as write_ledger
from anybatch.report.page import write as write
from anybatch.report.progress import Progress as Progress
from anybatch.report.progress import displayed as displayed
from anybatch.report.sentences import describe as describe
from anybatch.report.tensorboard import TensorBoardLog as TensorBoardLog
from anybatch.report.tensorboard import tensorboard_folder as tensorboard_folder
from anybatch.report.tensorboard import write_tensorboard as write_tensorboard
from anybatch.report.terminal import print_plan as print_plan
from anybatch.report.terminal import print_result as print_result
from anybatch.report.terminal import print_scale as print_scale
