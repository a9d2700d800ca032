"""A folder with a task that trains, and commands run in process."""

from __future__ import annotations

from tests.bad_input.conftest import (
    Outcome as Outcome,
)
from tests.bad_input.conftest import (
    clean_imports as clean_imports,
)
from tests.bad_input.conftest import (
    command as command,
)
from tests.bad_input.conftest import (
    folder as folder,
)
from tests.bad_input.conftest import (
    one_thread as one_thread,
)
from tests.bad_input.conftest import (
    write_task as write_task,
)
