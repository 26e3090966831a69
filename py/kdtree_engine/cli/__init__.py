"""The command `kdtree`.

Results go to stdout, progress and logs to stderr. Exit codes: 0 ok, 1 a test failed or a regression, 2 usage,
3 environment (no library, no GPU when asked for, a missing extra), 4 a fixture missing or damaged, 5 nothing
matched.
"""

from __future__ import annotations

import sys

import click

from .. import __version__
from .._errors import KdtError, KdtrError, KdtValueError
from .fixtures import fixtures
from .info import info
from .replay import replay
from .test import test

OK, FAILED, USAGE, ENVIRONMENT, FIXTURE, NOTHING_MATCHED = range(6)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kdtree")
def cli() -> None:
    """Native kernels for DDTree speculative decoding on MLA models."""


for command in (info, replay, fixtures, test):
    cli.add_command(command)


def exit_code(error: KdtError) -> int:
    """The exit code for an error that reached the top."""
    if isinstance(error, KdtrError):
        return FIXTURE
    return USAGE if isinstance(error, KdtValueError) else ENVIRONMENT


def main() -> None:
    """Entry point of the console script."""
    try:
        cli(prog_name="kdtree")
    except KdtError as error:
        click.echo(f"kdtree: {error}", err=True)
        sys.exit(exit_code(error))
