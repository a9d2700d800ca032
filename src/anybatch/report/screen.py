"""Screens on which progress is shown: a bar that is redrawn in a terminal, a notebook cell that is
updated, and plain lines everywhere else.

A screen draws in the calling thread. Unlike most progress bars, it has no background thread: data
loaders fork, and a child forked while another thread holds the console's lock would wait for it
forever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from io import StringIO
from typing import Any, final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

Write = Callable[[Console], None]
"""A function that prints on the given console."""


class Screen(ABC):
    """Shows text permanently and, if supported, a bar below it that is updated.

    Attributes:
        redraw_seconds: minimum time between two updates of the bar; None: bars are not supported.
    """

    redraw_seconds: float | None = None

    @abstractmethod
    def write(self, write: Write) -> None:
        """Show the output of `write` permanently."""

    def say(self, sentence: str, style: str = "") -> None:
        """Show a sentence permanently."""
        # Plain lines are not wrapped, since their reader wraps or searches them.
        self.write(
            lambda console: console.print(
                Text(sentence, style), soft_wrap=self.redraw_seconds is None
            )
        )

    def draw(self, bar: RenderableType) -> None:  # noqa: B027 - there may be none
        """Show `bar` in place of the current bar."""

    def close(self) -> None:  # noqa: B027
        """Leave the current bar, if any, in its last state; the next `draw` starts a new bar. Closing
        twice is allowed."""


def screen_of(console: Console) -> Screen:
    """Return the screen suitable for `console`."""
    if console.is_jupyter:
        return _Cell()
    if console.is_terminal and console.is_interactive:
        return _Terminal(console)
    return _Lines(console)


@final
class _Lines(Screen):
    """A screen for files, pipes, and terminals that do not support a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, write: Write) -> None:
        """See `Screen`."""
        write(self._console)


@final
class _Terminal(Screen):
    redraw_seconds = 0.1

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def write(self, write: Write) -> None:
        """See `Screen`."""
        write(self._console)

    def draw(self, bar: RenderableType) -> None:
        """See `Screen`."""
        if self._live is None:
            self._live = Live(bar, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self._live.update(bar, refresh=True)

    def close(self) -> None:
        """See `Screen`."""
        if self._live is not None:
            self._live.stop()
            self._live = None


@final
class _Cell(Screen):
    """The output of a notebook cell: one display with all permanent text and the bar.

    Every change sends the whole content, so that a notebook opened later shows its last state.
    """

    redraw_seconds = 0.5
    _COLUMNS = 100
    _FONT = "Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace"

    def __init__(self) -> None:
        self._written: list[tuple[str, str]] = []  # (HTML, text) of each output
        self._bar: RenderableType | None = None
        self._handle: Any = None

    def write(self, write: Write) -> None:
        """See `Screen`."""
        self._written.append(self._both(write))
        self._show()

    def draw(self, bar: RenderableType) -> None:
        """See `Screen`."""
        self._bar = bar
        self._show()

    def close(self) -> None:
        """See `Screen`."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            self.write(lambda console: console.print(bar))

    def _show(self) -> None:
        from IPython.display import display  # available, since this is a notebook

        shown = list(self._written)
        if (bar := self._bar) is not None:
            shown.append(self._both(lambda console: console.print(bar)))
        html = "".join(html for html, _ in shown)
        data = {
            "text/html": f'<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
            f'font-family:{self._FONT}">{html}</pre>',
            "text/plain": "".join(text for _, text in shown),
        }
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def _both(self, write: Write) -> tuple[str, str]:
        """The output of `write`, as HTML and as text."""
        console = Console(
            file=StringIO(), record=True, width=self._COLUMNS, force_jupyter=False, no_color=False
        )
        write(console)
        text = console.export_text(clear=False)
        return console.export_html(inline_styles=True, code_format="{code}"), text
