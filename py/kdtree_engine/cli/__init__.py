"""The command `kdtree`.

Results go to stdout, progress and logs to stderr. Exit codes: 0 ok, 1 a test failed or a regression, 2 usage,
3 environment (no library, no GPU when asked for, a missing extra, an output that cannot be written), 4 a fixture
missing or damaged, 5 nothing matched.
"""

from __future__ import annotations

import os
import signal
import sys

import click

from .. import __version__
from .._errors import KdtError, KdtrError, KdtValueError, Status
from .bench import bench
from .fixtures import fixtures
from .info import info
from .replay import replay
from .test import test

OK, FAILED, USAGE, ENVIRONMENT, FIXTURE, NOTHING_MATCHED = range(6)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kdtree")
def cli() -> None:
    """Native kernels for DDTree speculative decoding on MLA models."""


for command in (info, replay, fixtures, test, bench):
    cli.add_command(command)


def exit_code(error: KdtError) -> int:
    """The exit code for an error that reached the top."""
    if isinstance(error, KdtrError):
        return ENVIRONMENT if error.status == Status.OUT_OF_MEMORY else FIXTURE
    return USAGE if isinstance(error, KdtValueError) else ENVIRONMENT


def run() -> int:
    """Runs the command line; returns its exit code, with all that was written flushed."""
    if sys.stdout is None:
        return ENVIRONMENT  # closed: there is nowhere to put a result
    try:
        code = cli(prog_name="kdtree", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("kdtree: aborted", err=True)
        return 128 + signal.SIGINT
    except KdtError as error:
        click.echo(f"kdtree: {error}", err=True)
        return exit_code(error)
    except (OSError, MemoryError) as error:
        click.echo(f"kdtree: {error or 'out of memory'}", err=True)
        return ENVIRONMENT
    return code if isinstance(code, int) else OK


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # when the reader goes, as in `kdtree ... | head`, so do we
    code = run()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # What could not be written cannot be written at exit either; Python must not try.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or ENVIRONMENT
    sys.exit(code)
