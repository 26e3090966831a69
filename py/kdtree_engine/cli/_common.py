"""What the commands share."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .._errors import KdtrError, MissingExtraError, Status

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with right-aligned columns, the first left-aligned."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def printable(text: str) -> str:
    """Text from a file, safe to show: control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def progress(length: int, label: str) -> Any:
    """A progress bar on stderr; nothing when stderr is closed."""
    return click.progressbar(length=length, label=label, file=sys.stderr or io.StringIO())


def bundled(name: str) -> Path:
    """A KDTR file that ships with the package, by its name without suffix."""
    return Path(__file__).resolve().parents[1] / "data" / f"{name}.kdtr"


def resolve_fixture(name: str) -> Path:
    """A path as given, or the name of a bundled file. Raises KdtrError (exit 4) when it is neither."""
    if os.path.exists(name):  # not Path.exists: that raises where we may not look
        return Path(name)
    if os.path.exists(bundled(name)):
        return bundled(name)
    known = ", ".join(sorted(p.stem for p in bundled("x").parent.glob("*.kdtr")))
    raise KdtrError(f"{name!r}: no such file, and no bundled fixture of that name (bundled: {known})", Status.KDTR_IO)


def figure_for(option: str, path: Path, size: tuple[float, float]) -> Any:
    """An empty matplotlib figure that can be saved at `path`: what can fail fails before the work."""
    require_writable(option, path)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("plots need matplotlib: pip install 'kdtree-engine[plots]'") from None
    figure = Figure(figsize=size, layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in formats:
        raise click.BadParameter(f"{path}: expected a suffix of {', '.join(sorted(formats))}", param_hint=option)
    return figure


def require_writable(option: str, path: Path) -> None:
    """Fails before the work, not after it, when `path` cannot be written."""
    target = os.path.realpath(path)
    parent = os.path.dirname(target)
    exists = os.path.exists(target)
    if os.path.isdir(target) or not os.path.isdir(parent) or not os.access(target if exists else parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written", param_hint=option)
