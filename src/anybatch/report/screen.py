"""Screen: shows text permanently, with a bar below it that is redrawn in a terminal or a notebook cell.
In a file or a pipe there are plain lines only.

The bar is drawn in the calling thread. Unlike most progress bars, it has no background thread: data
loaders fork, and a child forked while another thread holds the console's lock would wait for it
forever.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any, final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_CELL_COLUMNS = 100
_CELL_STYLE = (
    "white-space:pre;overflow-x:auto;line-height:normal;"
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace"
)


@final
class Screen:
    """The output of `console`. A notebook cell has one display, which is replaced as a whole, so that a
    notebook opened later shows its last state.

    Attributes:
        redraw_seconds: minimum time between two updates of the bar; None: bars are not supported.
    """

    def __init__(self, console: Console) -> None:
        self._is_cell = console.is_jupyter
        self._console = console
        is_terminal = console.is_terminal and console.is_interactive
        self.redraw_seconds: float | None = 0.5 if self._is_cell else 0.1 if is_terminal else None
        self._bar: RenderableType | None = None
        self._live: Live | None = None
        self._cell: Any = None
        self._written: list[tuple[str, str]] = []  # HTML and text of each output of a cell

    @property
    def width(self) -> int:
        """Width in characters."""
        return _CELL_COLUMNS if self._is_cell else self._console.width

    def write(self, write: Callable[[Console], None]) -> None:
        """Show permanently what `write` prints on the console that it is given."""
        if self._is_cell:
            self._written.append(_recorded(write))
            self._update_cell()
        else:
            write(self._console)

    def say(self, sentence: str, style: str = "") -> None:
        """Show a sentence permanently."""
        # Plain lines are not wrapped, since their reader wraps or searches them.
        is_plain = self.redraw_seconds is None
        self.write(lambda console: console.print(Text(sentence, style), soft_wrap=is_plain))

    def draw(self, bar: RenderableType) -> None:
        """Show `bar` in place of the current bar."""
        self._bar = bar
        if self._is_cell:
            self._update_cell()
        elif self._live is None:
            self._live = Live(bar, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self._live.update(bar, refresh=True)

    def close(self) -> None:
        """Leave the current bar, if any, in its last state; the next `draw` starts a new bar. Closing
        twice is allowed."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._is_cell and (bar := self._bar) is not None:
            self._written.append(_recorded(lambda console: console.print(bar)))
        self._bar = None

    def _update_cell(self) -> None:
        from IPython.display import display  # available, since this is a notebook

        shown = list(self._written)
        if (bar := self._bar) is not None:
            shown.append(_recorded(lambda console: console.print(bar)))
        data = {
            "text/html": f'<pre style="{_CELL_STYLE}">{"".join(html for html, _ in shown)}</pre>',
            "text/plain": "".join(text for _, text in shown),
        }
        if self._cell is None:
            self._cell = display(data, raw=True, display_id=True)
        else:
            self._cell.update(data, raw=True)


def _recorded(write: Callable[[Console], None]) -> tuple[str, str]:
    """The output of `write` as HTML and as text."""
    console = Console(
        file=StringIO(), record=True, width=_CELL_COLUMNS, force_jupyter=False, no_color=False
    )
    write(console)
    text = console.export_text(clear=False)
    return console.export_html(inline_styles=True, code_format="{code}"), text
